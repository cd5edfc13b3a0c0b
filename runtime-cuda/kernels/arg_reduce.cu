// Position of the first extreme along an axis; NaN is an extreme of both kinds.
// Defines: T, LARGEST (1: of the largest, 0: of the smallest).
#include "common.cuh"

typedef typename Compute<T>::type Value;

// The best so far; `at` is -1 before there is one.
struct Best {
    Value x;
    i64 at;

    DEVICE bool beats(const Best& o) const {
        if (at < 0 || o.at < 0) return o.at < 0 && at >= 0;
        bool nan = is_nan(x), other = is_nan(o.x);
        if (nan != other) return nan;
        if (nan || x == o.x) return at < o.at;
        return LARGEST ? x > o.x : x < o.x;
    }

    DEVICE Best from(int lane) const {
        Best b = {(Value)__shfl_xor_sync(ALL_LANES, x, lane), __shfl_xor_sync(ALL_LANES, at, lane)};
        return b;
    }
};

DEVICE void warp_best(Best& best) {
    for (int d = WARP / 2; d > 0; d /= 2) {
        Best other = best.from(d);
        if (other.beats(best)) best = other;
    }
}

// One thread per line: where rows are interleaved in memory, or the axis is short. `x_at` has stride 0 along the axis.
KERNEL void arg_reduce_columns(i64* out, const T* x, CONSTANT Strided out_at, CONSTANT Strided x_at, i64 lines, i64 size,
                               i64 step) {
    for (i64 line = global_thread(); line < lines; line += global_threads()) {
        i64 at[2];
        locate<2>(line, at, out_at, x_at, x_at);
        Best best = {Value(), -1};
        for (i64 i = 0; i < size; i++) {
            Best mine = {load(x[at[1] + i * step]), i};
            if (mine.beats(best)) best = mine;
        }
        out[at[0]] = best.at;
    }
}

// gridDim = [lines, chunks], blockDim = [256]. With several chunks of `chunk` positions, `out` is scratch memory [lines, chunks],
// and a second launch, with one chunk, finds the best of them: `candidates` then are the first launch's output, `size` its chunks.
KERNEL void arg_reduce_rows(i64* out, const i64* candidates, const T* x, CONSTANT Strided out_at, CONSTANT Strided x_at, i64 size,
                            i64 step, i64 chunk) {
    __shared__ Value values[256 / WARP];
    __shared__ i64 places[256 / WARP];
    i64 line = blockIdx.x, first = (i64)blockIdx.y * chunk, end = first + chunk < size ? first + chunk : size;
    i64 at[2];
    locate<2>(line, at, out_at, x_at, x_at);
    Best best = {Value(), -1};
    for (i64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        i64 place = candidates ? candidates[line * size + i] : i;
        Best mine = {load(x[at[1] + place * step]), place};
        if (mine.beats(best)) best = mine;
    }
    warp_best(best);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) {
        values[warp] = best.x;
        places[warp] = best.at;
    }
    __syncthreads();
    if (warp > 0) return;
    bool has = lane < 256 / WARP;
    best.x = has ? values[lane] : Value();
    best.at = has ? places[lane] : -1;
    warp_best(best);
    if (lane == 0) out[gridDim.y == 1 ? at[0] : line * gridDim.y + blockIdx.y] = best.at;
}
