"""Records optimizer steps for test_optim_db.c: python3 record_optim_db.py > optim_db.h

Each configuration of PyTorch's own optimizer tests, except Muon's (record_muon.py): the weights of two
vectors after STEPS steps in float64, the truth, and how far PyTorch's float32 is from them. The second
vector joins after JOINS steps, so that its bias corrections count its own steps. Gradients span 2^-24
to 2^0, so that eps matters.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from generate import Generator, array, header, number
from optim_configs import all_configurations
from record_optimizers import gradient

COUNT, STEPS, JOINS = 8, 20, 5
NAMES = ["lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "lr_decay",
         "initial_sum", "momentum_decay", "nesterov", "maximize", "amsgrad", "centered", "decoupled"]


def run(kind, keywords, dtype):
    g = Generator(11)
    p = [torch.from_numpy(g.fill(1.0, COUNT)).to(dtype).requires_grad_() for _ in range(2)]
    opt = getattr(torch.optim, kind)(p[:1], **keywords)
    for step in range(STEPS):
        if step == JOINS:
            opt.add_param_group({"params": p[1:]})
        for one in p:
            one.grad = torch.from_numpy(gradient(g)).to(dtype)
        opt.step()
    return [v for one in p for v in one.detach().double().tolist()]


def main():
    torch.set_num_threads(1)
    cases, seen = [], set()
    for c in all_configurations():      # those for CUDA are often the same
        same = (c[0], *sorted(c[3].items()))
        if c[0] != "Muon" and same not in seen:
            cases.append(c)
        seen.add(same)
    header("record_optim_db.py", "Weights after steps of the configurations of PyTorch's optimizer tests.")
    print(f"#define DB_COUNT {COUNT}\n#define DB_STEPS {STEPS}\n#define DB_JOINS {JOINS}")
    print(f"#define DB_CASES {len(cases)}\n")
    print("typedef struct db_case {\n    const char *kind, *name;")
    print("    double " + ", ".join(NAMES[:6]) + ",\n           " + ", ".join(NAMES[6:10]) + ";\n    int " + ", ".join(NAMES[10:]) + ";\n} db_case;")
    print("static const db_case db_cases[DB_CASES] = {")
    for kind, name, _, f in cases:
        print(f'    {{ "{kind}", "{name}",\n      ' +
              ", ".join(number(float(f.get(n, 0))) for n in NAMES[:10]) + ", " +
              ", ".join(str(int(f.get(n, 0))) for n in NAMES[10:]) + " },")
    print("};")
    exact = [run(k, w, torch.float64) for k, _, w, _ in cases]
    single = [run(k, w, torch.float32) for k, _, w, _ in cases]
    print("/* [case][vector][element] */")
    array("double", "db_f64", [v for r in exact for v in r], 12)
    print("/* How far PyTorch's float32 is from float64, at most, per case. */")
    array("double", "db_spread", [max(abs(x - y) for x, y in zip(a, b))
                                  for a, b in zip(exact, single)], 2)
    print("#endif")


if __name__ == "__main__":
    main()
