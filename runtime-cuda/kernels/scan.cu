// y[t] = f(y[t-1], x[t]) along an axis. The running value is of the compute type and is rounded only where it is stored.
// Defines: T, OP (0: y + x, 1: y * x, 2: a y + x).
//
// A step is the function y -> a y + x; steps compose, so that parts of a row are scanned separately. The parts depend only on the
// sizes. Reversed rows have their base at the last element and negative strides.
#include "common.cuh"

typedef typename Compute<T>::type Value;

#define TILE_THREADS 256
#define TILE_ITEMS 4
#define TILE (TILE_THREADS * TILE_ITEMS)

struct Step {
    Value a, x;

    static DEVICE Step none() {
        Step s = {Value(1), Value(0)};
        return s;
    }

    static DEVICE Step of(Value x, Value a) {
#if OP == 0
        Step s = {Value(1), x};
#elif OP == 1
        Step s = {x, Value(0)};
#else
        // A NaN coefficient makes the row NaN from here on, also where it meets a zero.
        Step s = {a, is_nan(a) ? a : x};
#endif
        return s;
    }

    // The next y. The coefficients' product may overflow where the sequence itself does not: a zero stays a zero.
    DEVICE Value apply(Value y) const {
#if OP == 0
        return plus(y, x);
#elif OP == 1
        return times(y, a);
#else
        return y == Value(0) ? x : plus(times(a, y), x);
#endif
    }

    static DEVICE Step then(Step first, Step second) {
        Step s = {times(second.a, first.a), second.apply(first.x)};
        return s;
    }

    DEVICE Step up(int d) const {
        Step s = {(Value)__shfl_up_sync(ALL_LANES, a, d), (Value)__shfl_up_sync(ALL_LANES, x, d)};
        return s;
    }
};

#define START Value(OP == 1)

// One thread per line. `a` is read for OP 2 only. The operands have stride 0 along the axis; their strides there are the steps.
KERNEL void scan_lines(T* y, const T* x, const T* a, CONSTANT Strided y_at, CONSTANT Strided x_at, CONSTANT Strided a_at, i64 lines,
                       i64 n, i64 y_step, i64 x_step, i64 a_step) {
    for (i64 line = global_thread(); line < lines; line += global_threads()) {
        i64 at[3];
        locate<3>(line, at, y_at, x_at, a_at);
        Value value = START;
        for (i64 t = 0; t < n; t++) {
            Value in = load(x[at[1] + t * x_step]);
#if OP == 0
            value = plus(value, in);
#elif OP == 1
            value = times(value, in);
#else
            value = plus(times(load(a[at[2] + t * a_step]), value), in);
#endif
            y[at[0] + t * y_step] = Store<T>::of(value);
        }
    }
}

DEVICE Step step_at(const T* x, const T* a, i64 t, i64 end, i64 x_step, i64 a_step) {
    if (t >= end) return Step::none();
#if OP == 2
    return Step::of(load(x[t * x_step]), load(a[t * a_step]));
#else
    return Step::of(load(x[t * x_step]), Value(0));
#endif
}

// gridDim = [lines, parts], blockDim = [256]: the composition of a part's steps into `a_parts`, `x_parts` [lines, parts].
KERNEL void scan_parts(typename Compute<T>::type* a_parts, typename Compute<T>::type* x_parts, const T* x, const T* a,
                       CONSTANT Strided x_at, CONSTANT Strided a_at, i64 n, i64 part, i64 x_step, i64 a_step) {
    i64 line = blockIdx.x, first = (i64)blockIdx.y * part, end = first + part < n ? first + part : n;
    i64 at[2];
    locate<2>(line, at, x_at, a_at, a_at);
    Step all = Step::none();
    for (i64 tile = first; tile < end; tile += TILE) {
        Step mine = Step::none(), total;
        for (int k = 0; k < TILE_ITEMS; k++) {
            i64 t = tile + threadIdx.x * TILE_ITEMS + k;
            mine = Step::then(mine, step_at(x + at[0], a + at[1], t, end, x_step, a_step));
        }
        block_before<TILE_THREADS>(mine, total);
        all = Step::then(all, total);
    }
    if (threadIdx.x == 0) {
        a_parts[line * gridDim.y + blockIdx.y] = all.a;
        x_parts[line * gridDim.y + blockIdx.y] = all.x;
    }
}

// One thread per line: `starts` [lines, parts] becomes the value before each part.
KERNEL void scan_starts(typename Compute<T>::type* starts, const typename Compute<T>::type* a_parts,
                        const typename Compute<T>::type* x_parts, i64 lines, i64 parts) {
    for (i64 line = global_thread(); line < lines; line += global_threads()) {
        Value value = START;
        for (i64 p = line * parts; p < (line + 1) * parts; p++) {
            starts[p] = value;
            Step s = {a_parts[p], x_parts[p]};
            value = s.apply(value);
        }
    }
}

// gridDim = [lines, parts], blockDim = [256]: the values of a part. `starts` may be null with one part.
KERNEL void scan_values(T* y, const T* x, const T* a, const typename Compute<T>::type* starts, CONSTANT Strided y_at,
                        CONSTANT Strided x_at, CONSTANT Strided a_at, i64 n, i64 part, i64 y_step, i64 x_step, i64 a_step) {
    i64 line = blockIdx.x, first = (i64)blockIdx.y * part, end = first + part < n ? first + part : n;
    i64 at[3];
    locate<3>(line, at, y_at, x_at, a_at);
    Value carry = starts ? starts[line * gridDim.y + blockIdx.y] : START;
    for (i64 tile = first; tile < end; tile += TILE) {
        Step steps[TILE_ITEMS], mine = Step::none(), total;
        for (int k = 0; k < TILE_ITEMS; k++) {
            steps[k] = step_at(x + at[1], a + at[2], tile + threadIdx.x * TILE_ITEMS + k, end, x_step, a_step);
            mine = Step::then(mine, steps[k]);
        }
        Value value = block_before<TILE_THREADS>(mine, total).apply(carry);
        for (int k = 0; k < TILE_ITEMS; k++) {
            i64 t = tile + threadIdx.x * TILE_ITEMS + k;
            value = steps[k].apply(value);
            if (t < end) y[at[0] + t * y_step] = Store<T>::of(value);
        }
        carry = total.apply(carry);
    }
}
