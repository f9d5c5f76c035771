/* known.h - laws that programs are known to break ("*" is every program): shown, but no failure. A cure
 * strikes its lines out.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* f16 at level 3, rule 2, with a guard, resumed at step 41: other bits since the program draws its noise on the
 * device. The cause is not known. */
{ "gan", "resume" },
