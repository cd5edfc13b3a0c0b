// out[.., i, ..] = x[.., index[.., i, ..], ..]: one thread per element, or per 16-byte word of a run that shares an index.
// Defines: T, ACCUMULATE (1: adds to the old value).
#include "common.cuh"

// `x` has stride 0 along the indexed axis; its stride there is `step`, its size `size`.
KERNEL void gather(T* out, const T* x, const i64* index, CONSTANT Strided out_at, CONSTANT Strided x_at, CONSTANT Strided index_at,
                   i64 count, i64 step, i64 size, u32* flag) {
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 at[3];
        locate<3>(i, at, out_at, x_at, index_at);
        i64 row = index[at[2]];
        if (row < 0 || row >= size) {
            atomicOr(flag, FLAG_GATHER);
            continue;
        }
#if ACCUMULATE
        out[at[0]] = Store<T>::of(plus(load(out[at[0]]), load(x[at[1] + row * step])));
#else
        out[at[0]] = x[at[1] + row * step];
#endif
    }
}
