/* known.h - laws that programs are known to break ("*" is every program): shown, but no failure. A cure
 * strikes its lines out.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* Level 3, three micro-batches, a loss of 1e5: a weight's own f16 gradient overflows at scale 1, and the site
 * is said to have. */
{ "two_tasks", "events" },
