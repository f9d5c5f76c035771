"""Records PyTorch's learning rates for test_schedules.c: python3 record_schedules.py > schedules.h

Rates of 200 steps (schedule_cases.py): of steps 0 to 9, 81 and 199, and of each fifth step, which the milestones are.
SPDX-License-Identifier: MIT OR Unlicense"""
from generate import array, header, number
from schedule_cases import CASES, FIELDS, LR, NUMBERS, rates

STEPS = 200
SHOWN = list(range(10)) + list(range(10, STEPS, 5)) + [81, 199]


def main():
    header("record_schedules.py", "Learning rates of PyTorch's schedules.")
    print(f"#define SCHEDULE_CASES {len(CASES)}\n#define SCHEDULE_SHOWN {len(SHOWN)}")
    print(f"static const double schedule_lr = {number(LR)};\n")
    print("typedef struct schedule_case {\n    const char *name;\n    mixp_schedule_kind kind;")
    print("    double base;             /* lr of the optimizer, of schedule_lr */")
    print("    int " + ", ".join(FIELDS) + ", milestones[4];")
    print("    double " + ", ".join(NUMBERS) + ";\n} schedule_case;")
    print("static const schedule_case schedule_cases[SCHEDULE_CASES] = {")
    for name, kind, f, _ in CASES:
        whole = [str(f.get(n, 0)) for n in FIELDS]
        ends = (f.get("milestones", []) + [0] * 4)[:4]
        print(f'    {{ "{name}", MIXP_SCHEDULE_{kind}, {number(float(f.get("base", 1.0)))},\n      ' +
              ", ".join(whole) + ", { " + ", ".join(map(str, ends)) + " }, " +
              ", ".join(number(float(f.get(n, 0.0)), 17) for n in NUMBERS) + " },")
    print("};")
    array("int", "schedule_shown", SHOWN)
    print("/* [case][step shown] */")
    array("double", "schedule_rates", [t[i] for c in CASES for t in [rates(c[3], STEPS)] for i in SHOWN], 17)
    print("#endif")


if __name__ == "__main__":
    main()
