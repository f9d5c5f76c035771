/* known.h - laws that programs are known to break ("*" is every program): shown, but no failure. A cure
 * strikes its lines out.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
