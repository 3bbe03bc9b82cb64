"""The kernels of quantisation on CUDA, bit for bit what `quantize_reference` and `dequantize_reference` compute.

They work on many matrices in one launch: services/weight_sync/quantize_cuda.py says what a table of matrices holds. A
program quantises a block, or some rows with a scale each; if a whole matrix shares a scale, one launch finds the
largest magnitude and the next one encodes.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _magnitude_bits(x):
    """Bits of |x|, ordered as the magnitudes are, infinities and NaN on top: no maximum of them hides a NaN."""
    word: tl.constexpr = tl.core.get_int_dtype(x.dtype.primitive_bitwidth, True)
    return x.to(word, bitcast=True) & ((1 << (x.dtype.primitive_bitwidth - 1)) - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _divide(x, divisor, inverse):
    """x / divisor, near enough to the float32 quotient to become the same e4m3 code; `inverse` is 1 / divisor, rounded.

    One correction by the remainder (Markstein, IBM Journal of R&D 34, 1990) leaves an error below 1.5 * 2**-46 times
    the power of two under the quotient. A code depends on the side of the middle between two codes on which the
    rounded quotient lies, so only quotients that near to the float32 rounding boundaries beside a middle could differ.
    Middles have 5 significant bits; hence such a quotient needs a divisor whose 24-bit significand is within 6 of a
    multiple of 2**20, and a test goes through all of those. Nothing underflows in quotients of 2**-10 or more, and
    smaller ones become 0 either way. The excess is subtracted, not added, because that keeps the sign of a zero.
    """
    quotient = x * inverse
    excess = tl.fma(quotient, divisor, x * -1.0)
    return tl.fma(excess, inverse * -1.0, quotient)


@triton.jit
def _scale(largest, fp8_max: tl.constexpr, floor: tl.constexpr, ue8m0: tl.constexpr):
    """Scales from the largest magnitudes, float32; those of a NaN or an infinity are not below infinity."""
    # Plain `/` is an approximation on CUDA; div_rn rounds to nearest as IEEE division does.
    scale = tl.div_rn(tl.where(largest < floor, floor, largest), fp8_max)
    if ue8m0:
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), up, scale)
    return scale


@triton.jit
def _find_matrix(table_ptr, slots: tl.constexpr):
    """The column of a table for the matrix that this program belongs to, and the number of the program within it."""
    firsts = tl.load(table_ptr + tl.arange(0, slots))
    matrix = table_ptr + tl.sum((firsts <= tl.program_id(0)).to(tl.int32), 0) - 1
    return matrix, tl.program_id(0) - tl.load(matrix).to(tl.int32)


@triton.jit
def _layout(matrix, slots: tl.constexpr, wide: tl.constexpr):
    """Strides of rows and columns, rows and columns of a matrix."""
    row_stride = tl.load(matrix + 2 * slots)
    column_stride = tl.load(matrix + 3 * slots)
    rows = tl.load(matrix + 4 * slots).to(tl.int32)
    columns = tl.load(matrix + 5 * slots).to(tl.int32)
    if wide:  # said so that 16 bytes are loaded and stored at once
        row_stride, column_stride, columns = tl.multiple_of(row_stride, 16), 1, tl.multiple_of(columns, 16)
    return row_stride, column_stride, rows, columns


@triton.jit
def _results(matrix, buffer_ptr, slots: tl.constexpr, element: tl.constexpr):
    """Where the values, as `element`, and the scales of a matrix go in the buffer."""
    values_ptr = buffer_ptr + tl.multiple_of(tl.load(matrix + 6 * slots), 16)
    scales_ptr = buffer_ptr + tl.load(matrix + 7 * slots)
    return values_ptr.to(tl.pointer_type(element)), scales_ptr.to(tl.pointer_type(tl.float32))


@triton.jit
def _tile(index, columns, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Numbers of the rows, [tile_rows, 1], and columns, [1, tile_columns], of a tile; tiles are counted row by row."""
    column_tiles = tl.cdiv(columns, tile_columns)
    row = index // column_tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = index % column_tiles * tile_columns + tl.arange(0, tile_columns)[None, :]
    return row, column


@triton.jit
def _places(pointer, row, column, row_stride, column_stride, wide: tl.constexpr):
    """Pointers to elements of a matrix."""
    places = pointer + row * row_stride + column.to(tl.int64) * column_stride
    if wide:
        places = tl.multiple_of(places, [1, 16])
    return places


@triton.jit
def quantize_blocks(
    table_ptr,
    buffer_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
    ue8m0: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """A program quantises one block."""
    matrix, index = _find_matrix(table_ptr, slots)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(element))
    row_stride, column_stride, rows, columns = _layout(matrix, slots, wide)
    values_ptr, scales_ptr = _results(matrix, buffer_ptr, slots, tl.float8e4nv)
    row, column = _tile(index, columns, block_rows, block_columns)
    inside = (row < rows) & (column < columns)
    places = _places(x_ptr, row, column, row_stride, column_stride, wide)
    x = tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first")
    largest = tl.reduce(_magnitude_bits(x), None, _larger)
    scale = _scale(largest.to(x.dtype, bitcast=True).to(tl.float32), fp8_max, floor, ue8m0)
    tl.store(scales_ptr + index, scale)
    tl.store(matrix + 8 * slots, 0, mask=(scale < float("inf")) == 0)
    # No clamp: no |x| is above absmax, so quotients pass 448 by a rounding at most, and become 448.
    values = _divide(x.to(tl.float32), scale, tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(values_ptr + row.to(tl.int64) * columns + column, values, mask=inside)


@triton.jit
def _larger_pair(a, b):
    """The larger of two magnitudes, for both bfloat16 of a word at once."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _encode_pair(low, high):
    """The e4m3 codes of two floats in one word; beyond 448 it saturates."""
    instruction: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(instruction, "=h,r,r", [low, high], tl.int16, is_pure=True, pack=1)


@triton.jit
def quantize_pairs(
    table_ptr,
    buffer_ptr,
    slots: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
    ue8m0: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """As `quantize_blocks`, for wide matrices of bfloat16: two elements in a word, in half of the instructions."""
    matrix, index = _find_matrix(table_ptr, slots)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(tl.int32))
    row_stride, _, rows, columns = _layout(matrix, slots, True)
    row_stride, columns = tl.multiple_of(row_stride // 2, 8), tl.multiple_of(columns // 2, 8)
    values_ptr, scales_ptr = _results(matrix, buffer_ptr, slots, tl.int16)
    row, column = _tile(index, columns, block_rows, block_columns // 2)
    inside = (row < rows) & (column < columns)
    x = tl.load(tl.multiple_of(x_ptr + row * row_stride + column, [1, 8]), mask=inside, other=0)
    pair = tl.reduce(x & 0x7FFF7FFF, None, _larger_pair)
    largest = tl.maximum(pair >> 16, pair & 0xFFFF) << 16
    scale = _scale(largest.to(tl.float32, bitcast=True), fp8_max, floor, ue8m0)
    tl.store(scales_ptr + index, scale)
    tl.store(matrix + 8 * slots, 0, mask=(scale < float("inf")) == 0)
    inverse = tl.div_rn(1.0, scale)
    low = _divide((x << 16).to(tl.float32, bitcast=True), scale, inverse)
    high = _divide((x & -0x10000).to(tl.float32, bitcast=True), scale, inverse)
    tl.store(values_ptr + row.to(tl.int64) * columns + column, _encode_pair(low, high), mask=inside)


@triton.jit
def quantize_rows(
    table_ptr,
    buffer_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
    ue8m0: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    shared: tl.constexpr,
    encode: tl.constexpr,
):
    """A program works on `tile_rows` whole rows.

    With a scale for each row it does everything. With one that the matrix shares, one launch without `encode` finds the
    bits of the largest magnitude, row 9 of the table, and the next one with `encode` uses them.
    """
    matrix, index = _find_matrix(table_ptr, slots)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(element))
    row_stride, column_stride, rows, columns = _layout(matrix, slots, wide)
    values_ptr, scales_ptr = _results(matrix, buffer_ptr, slots, tl.float8e4nv)
    row = index * tile_rows + tl.arange(0, tile_rows)[:, None]
    from_left = tl.arange(0, tile_columns)[None, :]
    word: tl.constexpr = tl.core.get_int_dtype(element.primitive_bitwidth, True)
    if shared and encode:
        largest = tl.full([tile_rows, 1], 0, word) + tl.load(matrix + 9 * slots).to(word)
    else:
        tile = tl.full([tile_rows, tile_columns], 0, word)
        for left in range(0, columns, tile_columns):
            column = left + from_left
            places = _places(x_ptr, row, column, row_stride, column_stride, wide)
            x = tl.load(places, mask=(row < rows) & (column < columns), other=0.0)
            tile = tl.maximum(tile, _magnitude_bits(x))
        largest = tl.reduce(tile, 1, _larger, keep_dims=True)
    if shared and not encode:
        tl.atomic_max(matrix + 9 * slots, tl.reduce(largest, None, _larger).to(tl.int64))
    else:
        scale = _scale(largest.to(element, bitcast=True).to(tl.float32), fp8_max, floor, ue8m0)
        tl.store(scales_ptr + row, scale, mask=row < (tl.minimum(rows, 1) if shared else rows))
        tl.store(matrix + 8 * slots, 0, mask=tl.max((scale < float("inf")).to(tl.int32) ^ 1) > 0)
        inverse = tl.div_rn(tl.full([tile_rows, 1], 1.0, tl.float32), scale)
        for left in range(0, columns, tile_columns):
            column = left + from_left
            inside = (row < rows) & (column < columns)
            x = tl.load(_places(x_ptr, row, column, row_stride, column_stride, wide), mask=inside, other=0.0)
            values = _divide(x.to(tl.float32), scale, inverse).to(tl.float8e4nv)
            tl.store(values_ptr + row.to(tl.int64) * columns + column, values, mask=inside)


@triton.jit
def dequantize_tiles(
    table_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    by_row: tl.constexpr,
    shared: tl.constexpr,
):
    """A program decodes one tile: a block with a scale of its own, or rows with theirs, or a part of a whole."""
    matrix, index = _find_matrix(table_ptr, slots)
    codes_ptr = tl.load(matrix + slots).to(tl.pointer_type(tl.uint8))
    row_stride, column_stride, rows, columns = _layout(matrix, slots, wide)
    out_ptr = tl.load(matrix + 6 * slots).to(tl.pointer_type(element))
    scales_ptr = tl.load(matrix + 7 * slots).to(tl.pointer_type(tl.float32))
    row, column = _tile(index, columns, tile_rows, tile_columns)
    inside = (row < rows) & (column < columns)
    places = _places(codes_ptr, row, column, row_stride, column_stride, wide)
    codes = tl.load(places, mask=inside, other=0, eviction_policy="evict_first")
    if by_row:
        scale = tl.load(scales_ptr + row, mask=row < rows, other=0.0)
    else:
        scale = tl.load(scales_ptr + (0 if shared else index))
    wrong = tl.where((codes & 0x7F) == 0x7F, 1.0, 0.0) + (scale - scale)  # NaN where a scale is infinite or NaN
    tl.store(matrix + 8 * slots, 0, mask=tl.max((wrong != 0.0).to(tl.int32)) > 0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(_places(out_ptr, row, column, columns.to(tl.int64), 1, wide), values.to(element), mask=inside)
