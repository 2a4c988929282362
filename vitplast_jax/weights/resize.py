"""How does a position table fit another grid? By PyTorch's bicubic interpolation, as the sources of the weights do it.

In: a table [1, rows, d] with `prefix` rows before the grid's, both grids. Out: the table for the new grid.

PyTorch has two bicubic kernels. Plain: Keys' cubic with a = -0.75, reading the edge again beyond it (DINOv2). With
antialias (timm's `resample_abs_pos_embed`): a = -0.5, as wide as the scale when shrinking, weights outside cut off and
the rest renormalised. JAX's own differs from the first in `a` and at the border. DINOv2's own code without registers
uses the first, and asks for (new + 0.1) / old as the scale, which shifts every point a little.
"""

import math

import numpy as np


def resize_positions(table, prefix, old_grid, new_grid, antialias=True, offset=0.0):
    """Resizes the grid part of a position table.

    Args:
        table: [1, prefix + old_h * old_w, d], any float type; the result has it too.
        prefix: rows that belong to class and register tokens and stay as they are.
        old_grid, new_grid: (height, width) in patches.
        antialias: which of PyTorch's kernels (see above).
        offset: added to the new side before the scale is computed.
    Returns: [1, prefix + new_h * new_w, d].
    """
    if tuple(old_grid) == tuple(new_grid):
        return table
    grid = table[0, prefix:].reshape(*old_grid, -1).astype(np.float32)
    for axis in (0, 1):
        matrix = cubic_matrix(old_grid[axis], new_grid[axis], antialias, offset).astype(np.float32)
        grid = np.moveaxis(np.tensordot(matrix, grid, axes=(1, axis)), 0, axis)
    grid = grid.reshape(1, new_grid[0] * new_grid[1], -1).astype(table.dtype)
    return np.concatenate([table[:, :prefix], grid], axis=1)


def adapt_channels(kernel, channels):
    """The patch kernel for another number of image channels, as timm's `adapt_input_conv`.

    One channel: the sum, which answers as the source does to a grey image. More: the source's channels again and again,
    scaled so that the sum stays.

    Args:
        kernel: [patch height, patch width, c, d].
        channels: of the images.
    Returns: [patch height, patch width, channels, d] in the kernel's dtype.
    """
    old = kernel.shape[2]
    if channels == old:
        return kernel
    wide = kernel.astype(np.float32)
    if channels == 1:
        result = wide.sum(2, keepdims=True)
    else:
        result = np.tile(wide, (1, 1, -(-channels // old), 1))[:, :, :channels] * (old / channels)
    return result.astype(kernel.dtype)


def cubic_matrix(old, new, antialias, offset=0.0):
    """[new, old] float64: each row holds the weights of one output point; rows sum to one."""
    matrix = np.zeros((new, old))
    scale = old / (new + offset)
    for row in range(new):
        centre = scale * (row + 0.5)
        if antialias:
            stretch = max(scale, 1.0)
            first = max(int(centre - 2 * stretch + 0.5), 0)
            last = min(int(centre + 2 * stretch + 0.5), old)
            weights = [cubic((place - centre + 0.5) / stretch, -0.5) for place in range(first, last)]
            matrix[row, first:last] = np.array(weights) / sum(weights)
        else:
            # PyTorch's coordinates are float32, which shows in the fifth digit of a large grid.
            point = float(np.float32(scale) * np.float32(row + 0.5) - np.float32(0.5))
            left = math.floor(point)
            for place in range(left - 1, left + 3):
                matrix[row, min(max(place, 0), old - 1)] += cubic(point - place, -0.75)
    return matrix


def cubic(x, a):
    """Keys' kernel (IEEE ASSP 29, 1981): 1 at 0, 0 at the other whole numbers and from 2 on."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0
