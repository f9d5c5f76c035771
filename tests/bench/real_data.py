"""Writes twelve data sets that others made, for build/bench/real_data: one text file a set.

    python3 real_data.py FOLDER

The data are those that scikit-learn, vega_datasets and palmerpenguins carry in their packages:
nothing is downloaded. A set whose package is not installed is left out, and a line says so.

A file's first line is the name; the second is rows, columns, and classes (0: the target is a number);
then a line for each row: its columns and its target.
SPDX-License-Identifier: MIT OR Unlicense"""
import os
import sys


def sklearn_sets():
    from sklearn import datasets
    digits, wine = datasets.load_digits(), datasets.load_wine()
    cancer, diabetes = datasets.load_breast_cancer(), datasets.load_diabetes()
    raw = datasets.load_diabetes(scaled=False)
    unit = (wine.data - wine.data.mean(0)) / wine.data.std(0)
    yield "digits, in 0..1", digits.data / 16, digits.target, 10
    yield "digits, raw", digits.data, digits.target, 10
    yield "wine, raw", wine.data, wine.target, 3
    yield "wine, standardised", unit, wine.target, 3
    yield "breast cancer, raw", cancer.data, cancer.target, 2
    yield "diabetes, raw", raw.data, raw.target, 0
    yield "diabetes, scaled", diabetes.data, diabetes.target / 100, 0


def codes(column):
    names = sorted(set(column))
    return [names.index(x) for x in column], len(names)


def vega_sets():
    import numpy as np
    from vega_datasets import data
    jobs = data.us_employment()
    columns = [c for c in jobs.columns if c not in ("month", "government", "nonfarm_change")]
    yield "US employment, raw", jobs[columns].to_numpy(), jobs["government"].to_numpy() / 1000, 0
    power = data.iowa_electricity()
    source, n = codes(power["source"])
    year = power["year"].dt.year.to_numpy()
    x = np.concatenate([year[:, None], np.eye(n)[source]], 1)
    yield "Iowa electricity, raw", x, power["net_generation"].to_numpy() / 1000, 0
    cars = data.cars().dropna()
    names = ["Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration"]
    x = np.concatenate([cars[names].to_numpy(), cars["Year"].dt.year.to_numpy()[:, None]], 1)
    yield "cars, raw", x, cars["Miles_per_Gallon"].to_numpy(), 0
    days = data.seattle_weather()
    names = ["precipitation", "temp_max", "temp_min", "wind"]
    kind, n = codes(days["weather"])
    yield "Seattle weather", days[names].to_numpy(), kind, n


def penguin_sets():
    from palmerpenguins import load_penguins
    birds = load_penguins()
    names = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g", "year"]
    birds = birds.dropna(subset=names)
    kind, n = codes(birds["species"])
    yield "penguins, raw", birds[names].to_numpy(), kind, n


def write(path, name, x, y, classes):
    with open(path, "w", encoding="ascii") as f:
        print(name, file=f)
        print(len(x), len(x[0]), classes, file=f)
        for row, target in zip(x, y):
            print(*(f"{float(v):.9g}" for v in row), f"{float(target):.9g}", file=f)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: real_data.py FOLDER")
    os.makedirs(sys.argv[1], exist_ok=True)
    for package, sets in (("scikit-learn", sklearn_sets), ("vega_datasets", vega_sets),
                          ("palmerpenguins", penguin_sets)):
        try:
            for name, x, y, classes in sets():
                file = name.lower().replace(",", "").replace("..", "_").replace(" ", "_") + ".txt"
                write(os.path.join(sys.argv[1], file), name, x, y, classes)
        except ImportError as e:
            print(f"{package}: left out: {e}", file=sys.stderr)


if __name__ == "__main__":
    main()
