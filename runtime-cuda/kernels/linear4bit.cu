// A matrix that is stored in four bits an element, dequantised: a code word times the scale of its block. Defines: T, NESTED (1: the scale
// of a block is a word of a second code times the scale of its own block, plus an offset).
#include "common.cuh"

// Elements of a thread, of four adjacent bytes: one division finds their block.
#define RUN 8

// `scales` are those of blocks of elements, or of blocks of scales, which `index` and `second` give then.
DEVICE float scale_of(i64 block, const float* scales, const u8* index, const float* second, i64 nested_block, float offset) {
#if NESTED
    // Rounded twice, as where it is composed.
    return __fadd_rn(__fmul_rn(second[index[block]], scales[quotient(block, nested_block)]), offset);
#else
    return scales[block];
#endif
}

// out[i] = code[half byte i] * scale of block i / block, for i < count; of a byte the high half comes first. `out` begins at a multiple of
// 16 bytes, `code` has 16 words, `second` 256.
KERNEL void dequantise4bit(T* out, const u8* packed, const float* code, const float* scales, const u8* index, const float* second, i64 count,
                           i64 block, i64 nested_block, float offset) {
    for (i64 run = global_thread(); run * RUN < count; run += global_threads()) {
        i64 at = run * RUN, left = count - at, current = quotient(at, block), end = (current + 1) * block - at;
        float scale = scale_of(current, scales, index, second, nested_block, offset);
        typename Compute<T>::type values[RUN];
        for (int i = 0; i < RUN && i < left; i++) {
            if (i == end) {
                scale = scale_of(++current, scales, index, second, nested_block, offset);
                end += block;
            }
            u8 byte = packed[(at + i) / 2];
            values[i] = code[i % 2 ? byte & 15 : byte >> 4] * scale;
        }
        constexpr int N = 16 / (int)sizeof(T) < RUN ? 16 / (int)sizeof(T) : RUN;
        if (left >= RUN) {
            for (int i = 0; i < RUN; i += N) {
                typename Compute<T>::type part[N];
                for (int k = 0; k < N; k++) part[k] = values[i + k];
                store_pack(out + at + i, part);
            }
        } else {
            for (int i = 0; i < left; i++) out[at + i] = Store<T>::of(values[i]);
        }
    }
}
