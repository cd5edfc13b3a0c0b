// Stable sort along an axis into values and positions; NaN is the largest. Equal values keep their order because positions take
// part in the comparison (short lines), or because the passes of radix.cu keep it (long ones). Defines: T.
#include "common.cuh"

typedef decltype(sort_key(typename Compute<T>::type())) Key;

// Descending is ascending by the complement.
DEVICE Key key_of(T x, int descending) {
    Key key = sort_key(load(x));
    return descending ? ~key : key;
}

// Lines of up to `width` elements, a power of two: gridDim = [lines], blockDim = [min(width / 2, 512)] (at least 32),
// (sizeof(key) + 4) * width bytes of shared memory; a bitonic network (Batcher 1968). Strides along the axis are the steps.
KERNEL void sort_short(T* values, i64* index, const T* x, CONSTANT Strided values_at, CONSTANT Strided index_at,
                       CONSTANT Strided x_at, int n, int width, i64 values_step, i64 index_step, i64 x_step, int descending) {
    DYNAMIC_SHARED(memory);
    Key* keys = (Key*)memory;
    int* places = (int*)(keys + width);
    i64 at[3];
    locate<3>((i64)blockIdx.x, at, values_at, index_at, x_at);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        keys[i] = i < n ? key_of(x[at[2] + i * x_step], descending) : ~(Key)0;
        places[i] = i;
    }
    for (int run = 2; run <= width; run *= 2) {
        for (int reach = run / 2; reach > 0; reach /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < width / 2; pair += blockDim.x) {
                int low = pair / reach * 2 * reach + pair % reach, high = low + reach;
                Key a = keys[low], b = keys[high];
                int pa = places[low], pb = places[high];
                bool ordered = a < b || (a == b && pa < pb), rising = (low & run) == 0;
                if (ordered != rising) {
                    keys[low] = b;
                    keys[high] = a;
                    places[low] = pb;
                    places[high] = pa;
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        values[at[0] + i * values_step] = x[at[2] + places[i] * x_step];
        index[at[1] + i * index_step] = places[i];
    }
}

// Keys and positions [lines, n] of lines to be sorted by radix.cu.
KERNEL void sort_keys(Key* keys, u32* places, const T* x, CONSTANT Strided x_at, i64 count, i64 n, i64 x_step, int descending) {
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / n, t = i - line * n;
        keys[i] = key_of(x[locate(line, x_at) + t * x_step], descending);
        places[i] = (u32)t;
    }
}

// Fills the outputs from the sorted positions.
KERNEL void sort_values(T* values, i64* index, const T* x, const u32* places, CONSTANT Strided values_at, CONSTANT Strided index_at,
                        CONSTANT Strided x_at, i64 count, i64 n, i64 values_step, i64 index_step, i64 x_step) {
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / n, t = i - line * n, at[3];
        locate<3>(line, at, values_at, index_at, x_at);
        values[at[0] + t * values_step] = x[at[2] + places[i] * x_step];
        index[at[1] + t * index_step] = places[i];
    }
}
