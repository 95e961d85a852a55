"""How fine should the text grid be? `python -m bench.boundaries`

Two prompts that share their first d bytes of text share every grid boundary up to d. The text between the deepest
of these boundaries and d is lost: it is computed again, or at least no router can count on it. For each
(base, shift) and text size this prints:

- keys: grid keys of a prompt of that size (message and image boundaries come on top);
- mean: the mean loss as a part of d, if every d in the text is equally likely;
- worst: the worst loss for a d of at least 4 KB (below that, the loss is up to `base` bytes).
"""

from __future__ import annotations

from math import log

from gateway.prompt.stream import GRID_BASE_BYTES, GRID_SHIFT, grid

CANDIDATES = [(1024, 3), (512, 2), (512, 3), (512, 4), (256, 3), (256, 4), (256, 5), (128, 4)]
SIZES_BYTES = [1 << 10, 4 << 10, 8 << 10, 16 << 10, 27 << 10, 64 << 10, 256 << 10, 1 << 20]
WORST_FROM_BYTES = 4 << 10


def mean_loss(offsets: list[int], size_bytes: int) -> float:
    """The mean of (d - deepest boundary up to d) / d over all d in the text."""
    starts = [0, *offsets]
    ends = [*offsets, size_bytes]
    lost = sum(
        end - start - (start * log(end / start) if start else 0) for start, end in zip(starts, ends, strict=True)
    )
    return lost / size_bytes


def worst_loss(offsets: list[int], size_bytes: int) -> float:
    """The greatest such loss for a d of at least WORST_FROM_BYTES. It occurs just before a boundary."""
    losses = [
        (end - start) / end
        for start, end in zip([0, *offsets], [*offsets, size_bytes], strict=True)
        if end >= WORST_FROM_BYTES
    ]
    return max(losses, default=0.0)


def main() -> None:
    """Prints the table and marks the grid in use."""
    print("keys / mean % / worst % by text size")
    print("base,shift  " + "".join(f"{size >> 10:>12} KB   " for size in SIZES_BYTES))
    for base_bytes, shift in CANDIDATES:
        cells = []
        for size in SIZES_BYTES:
            offsets = grid(size, base_bytes, shift)
            worst = f"{worst_loss(offsets, size):6.1%}" if size >= WORST_FROM_BYTES else "     -"
            cells.append(f"{len(offsets):4d} {mean_loss(offsets, size):6.1%} {worst}")
        mark = "*" if (base_bytes, shift) == (GRID_BASE_BYTES, GRID_SHIFT) else " "
        print(f"{base_bytes:>5},{shift}{mark}   " + "".join(f"{cell:<18}" for cell in cells))


if __name__ == "__main__":
    main()
