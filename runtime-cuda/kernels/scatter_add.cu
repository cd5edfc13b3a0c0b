// out[.., index[.., i, ..], ..] += src[.., i, ..], in ascending order of i. f16 and bf16 are summed in f32 and rounded once.
// Defines: T, K (u32 or u64: the type of a key).
//
// The axes other than the scattered one are `lines` where the index has a stride, and `columns` where it has none (an embedding's
// features): all columns of a line go the same ways. Every pair (line, i) gets the key `line * size + index`; the pairs are
// sorted by it (radix.cu; stable, so i stays in order); then each destination walks its pairs, all of them at once.
#include "common.cuh"

// Of pair p = line * n + i. A pair out of range gets the largest key, which no destination has. `index_at` has axes [lines.., n].
KERNEL void scatter_keys(K* keys, u32* pairs, const i64* index, CONSTANT Strided index_at, i64 count, i64 n, i64 size, u32* flag) {
    for (i64 p = global_thread(); p < count; p += global_threads()) {
        i64 to = index[locate(p, index_at)];
        bool inside = to >= 0 && to < size;
        if (!inside) atomicOr(flag, FLAG_SCATTER_ADD);
        keys[p] = inside ? (K)(p / n * size + to) : ~(K)0;
        pairs[p] = (u32)p;
    }
}

// blockDim = [32, 4]: a row of threads takes the destination whose first pair, in sorted order, is its own; others have nothing to
// do. gridDim = [blocks of 32 columns, blocks of 4 pairs]; both are strided over. `src_at` has axes [lines.., n]; the offsets of
// columns and of the destination's line are apart.
KERNEL void scatter_segments(T* out, const T* src, const K* keys, const u32* pairs, CONSTANT Strided src_at,
                             CONSTANT Strided out_line, CONSTANT Strided src_column, CONSTANT Strided out_column, i64 count,
                             i64 columns, i64 size, i64 step) {
    for (i64 first = (i64)blockIdx.y * blockDim.y + threadIdx.y; first < count; first += (i64)gridDim.y * blockDim.y) {
        K key = keys[first];
        if (key == ~(K)0 || (first > 0 && keys[first - 1] == key)) continue;
        i64 line = (i64)(key / (K)size), to = (i64)(key % (K)size);
        i64 out_row = locate(line, out_line) + to * step;
        for (i64 c = global_thread(); c < columns; c += global_threads()) {
            i64 at[2];
            locate<2>(c, at, src_column, out_column, out_column);
            T* place = out + out_row + at[1];
            typename Compute<T>::type sum = load(*place);
            for (i64 p = first; p < count && keys[p] == key; p++) sum = plus(sum, load(src[locate(pairs[p], src_at) + at[0]]));
            *place = Store<T>::of(sum);
        }
    }
}

// For few indices, or lines enough to fill the device: one thread per line walks them all. `out` has stride 0 along the axis.
// Half-precision sums would be rounded at every addition here, so they use the kernels above.
KERNEL void scatter_lines(T* out, const T* src, const i64* index, CONSTANT Strided src_at, CONSTANT Strided out_at,
                          CONSTANT Strided index_at, i64 lines, i64 n, i64 src_step, i64 index_step, i64 size, i64 step,
                          u32* flag) {
    for (i64 line = global_thread(); line < lines; line += global_threads()) {
        i64 at[3];
        locate<3>(line, at, src_at, out_at, index_at);
        for (i64 i = 0; i < n; i++) {
            i64 to = index[at[2] + i * index_step];
            if (to < 0 || to >= size) {
                atomicOr(flag, FLAG_SCATTER_ADD);
                continue;
            }
            T* place = out + at[1] + to * step;
            *place = Store<T>::of(plus(load(*place), load(src[at[0] + i * src_step])));
        }
    }
}
