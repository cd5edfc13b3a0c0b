// Softmax over the last axis of contiguous rows, its logarithm, and their gradients.
// Defines: T, LOG, ROW_THREADS (32: blockDim = [32, rows], gridDim = [rows / blockDim.y]; else: blockDim = [ROW_THREADS], gridDim =
// [rows]), VECTOR (1: all operands begin at multiples of 16 bytes; rows may begin anywhere).
#include "common.cuh"

typedef typename Compute<T>::type Value;
typedef Row<ROW_THREADS> Group;

// A row of -inf gives zeros.
KERNEL void softmax(T* y, const T* x, i64 rows, i64 width) {
    i64 row = Group::index();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    Exponentials<Value> all = Exponentials<Value>::none();
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value in[VEC];
        part.load(in, x + i, -infinity(Value()));
        all.add(in);
    });
    all.template join<ROW_THREADS>();
    Value base = finite_or_zero(all.top), log_sum = logarithm(all.sum);
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value v[VEC];
        part.load(v, x + i, Value(0));
        for (int k = 0; k < VEC; k++) {
            v[k] -= base;
            v[k] = LOG ? v[k] - log_sum : all.sum == Value(0) ? Value(0) : exponential(v[k]) / all.sum;
        }
        part.store(y + i, v);
    });
}

// d = y (g - sum y g), or g - exp(y) sum g for the logarithm.
KERNEL void softmax_grad(T* d, const T* y, const T* g, i64 rows, i64 width) {
    i64 row = Group::index();
    if (row >= rows) return;
    y += row * width;
    g += row * width;
    d += row * width;
    Value sum = Value(0);
    Group::walk<VEC>(y, width, [&](i64 i, Part<VEC> part) {
        Value out[VEC], up[VEC];
        part.load(out, y + i, Value(0));
        part.load(up, g + i, Value(0));
        for (int k = 0; k < VEC; k++) sum += LOG ? up[k] : out[k] * up[k];
    });
    sum = Group::sum(sum);
    Group::walk<VEC>(y, width, [&](i64 i, Part<VEC> part) {
        Value out[VEC], up[VEC];
        part.load(out, y + i, Value(0));
        part.load(up, g + i, Value(0));
        for (int k = 0; k < VEC; k++) up[k] = LOG ? up[k] - exponential(out[k]) * sum : out[k] * (up[k] - sum);
        part.store(d + i, up);
    });
}
