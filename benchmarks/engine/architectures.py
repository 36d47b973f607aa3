"""Print the bytes of a token, a window and a state by architecture, from the specs of layers.

    python -m benchmarks.engine.architectures

Writes results/architectures.jsonl.
"""

from benchmarks.engine.released import bytes_by_architecture
from benchmarks.rows import write_rows


def main() -> None:
    rows = bytes_by_architecture()
    heads = f"{'':22}{'layers':28}{'a token':>12}{'in FP8':>12}{'a window':>14}{'a state':>14}"
    print(f"{heads}{'32,768 tokens':>18}   bytes")
    for row in rows:
        model, layers, *sizes, _ = row.values()
        token, coded, window, state, whole = (f"{size:,}" if size else "-" for size in sizes)
        print(f"{model:22}{layers:28}{token:>12}{coded:>12}{window:>14}{state:>14}{whole:>18}", flush=True)
    write_rows("architectures", "python -m benchmarks.engine.architectures", rows)


if __name__ == "__main__":
    main()
