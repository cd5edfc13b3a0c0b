// Softmax over the last axis of contiguous rows, its logarithm, and their gradients.
// Defines: T, LOG, ROW_THREADS (32: blockDim = [32, rows], gridDim = [rows / blockDim.y]; else: blockDim = [ROW_THREADS], gridDim =
// [rows]), VECTOR (1: the width is a multiple of 16 bytes and all operands are aligned to that).
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
    for (i64 i = Group::thread() * VEC; i < width; i += ROW_THREADS * VEC) {
        Value in[VEC];
        load_pack(in, x + i);
        all.add(in);
    }
    all.join<ROW_THREADS>();
    Value base = finite_or_zero(all.top), log_sum = logarithm(all.sum);
    for (i64 i = Group::thread() * VEC; i < width; i += ROW_THREADS * VEC) {
        Value v[VEC];
        load_pack(v, x + i);
        for (int k = 0; k < VEC; k++) {
            v[k] -= base;
            v[k] = LOG ? v[k] - log_sum : all.sum == Value(0) ? Value(0) : exponential(v[k]) / all.sum;
        }
        store_pack(y + i, v);
    }
}

// d = y (g - sum y g), or g - exp(y) sum g for the logarithm.
KERNEL void softmax_grad(T* d, const T* y, const T* g, i64 rows, i64 width) {
    i64 row = Group::index();
    if (row >= rows) return;
    y += row * width;
    g += row * width;
    d += row * width;
    Value sum = Value(0);
    for (i64 i = Group::thread() * VEC; i < width; i += ROW_THREADS * VEC) {
        Value out[VEC], up[VEC];
        load_pack(out, y + i);
        load_pack(up, g + i);
        for (int k = 0; k < VEC; k++) sum += LOG ? up[k] : out[k] * up[k];
    }
    sum = Group::sum(sum);
    for (i64 i = Group::thread() * VEC; i < width; i += ROW_THREADS * VEC) {
        Value out[VEC], up[VEC];
        load_pack(out, y + i);
        load_pack(up, g + i);
        for (int k = 0; k < VEC; k++) up[k] = LOG ? up[k] - exponential(out[k]) * sum : out[k] * (up[k] - sum);
        store_pack(d + i, up);
    }
}
