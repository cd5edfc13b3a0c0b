// Cross-entropy of rows of logits [N, C] with integer classes, and its gradient straight from the logits. Probabilities exist in
// registers alone. Rows are contiguous; elements from one to the next are `pitch` of the logits and `d_pitch` of the gradient. Losses
// and their gradient have the type that is computed in. Defines: T, SMOOTH (1: label smoothing), ROW_THREADS and VECTOR as in
// softmax.cu: with VECTOR, a row of the gradient is aligned as that of the logits. `w` is null without class weights.
#include "common.cuh"

typedef typename Compute<T>::type Value;
typedef Row<ROW_THREADS> Group;

// A class that is neither ignored nor in range writes nothing but the flag.
DEVICE bool is_class(i64 target, i64 classes, i64 ignored, u32* flag) {
    if (target == ignored || (target >= 0 && target < classes)) return true;
    if (Group::thread() == 0) atomicOr(flag, FLAG_CROSS_ENTROPY);
    return false;
}

DEVICE Value weight_of(const T* w, i64 c) { return w ? load(w[c]) : Value(1); }

// Loss w_y (lse - x_y) (1 - s) + s / C sum_c w_c (lse - x_c), 0 where the class is ignored; and the two parts of lse:
// the row's largest logit `top` (0 where that is infinite) and `log_sum`, ln sum_c exp(x_c - top). Their sum would be
// rounded to the spacing of `top`.
KERNEL void cross_entropy(typename Compute<T>::type* loss, typename Compute<T>::type* tops, typename Compute<T>::type* log_sums,
                          const T* x, const i64* target, const T* w, i64 pitch, i64 rows, i64 classes, i64 ignored, double smoothing, u32* flag) {
    i64 row = Group::index();
    if (row >= rows) return;
    i64 own = target[row];
    if (!is_class(own, classes, ignored, flag)) return;
    x += row * pitch;
    Exponentials<Value> all = Exponentials<Value>::none();
    Group::walk<VEC>(x, classes, [&](i64 i, Part<VEC> part) {
        Value in[VEC];
        part.load(in, x + i, -infinity(Value()));
        all.add(in);
    });
    all.join<ROW_THREADS>();
    Value top = finite_or_zero(all.top), log_sum = logarithm(all.sum), total = Value(0), joint = Value(0);
    if (SMOOTH) {
        Group::walk<VEC>(x, classes, [&](i64 i, Part<VEC> part) {
            Value in[VEC], weight[VEC];
            part.load(in, x + i, Value(0));
            if (w) part.load_any(weight, w + i, Value(0));
            for (int k = 0; k < VEC; k++) {
                if (!part.has(k)) continue;
                total += w ? (in[k] - top) * weight[k] : in[k] - top;
                joint += w ? weight[k] : Value(1);
            }
        });
        total = Group::sum(total);
        joint = Group::sum(joint);
    }
    if (Group::thread() != 0) return;
    Value value = Value(0);
    if (own != ignored) {
        value = (log_sum - (load(x[own]) - top)) * weight_of(w, own);
        if (SMOOTH) value = value * Value(1 - smoothing) + (log_sum * joint - total) * Value(smoothing / classes);
    }
    loss[row] = value;
    tops[row] = top;
    log_sums[row] = log_sum;
}

// d_c = g ((w_y (1 - s) + s / C sum w) exp(x_c - top - log_sum) - s / C w_c - w_y (1 - s) [c = y]).
KERNEL void cross_entropy_grad(T* d, const T* x, const i64* target, const typename Compute<T>::type* tops,
                               const typename Compute<T>::type* log_sums, const typename Compute<T>::type* g, const T* w, i64 d_pitch,
                               i64 pitch, i64 rows, i64 classes, i64 ignored, double smoothing, u32* flag) {
    i64 row = Group::index();
    if (row >= rows) return;
    i64 own = target[row];
    if (!is_class(own, classes, ignored, flag)) return;
    x += row * pitch;
    d += row * d_pitch;
    bool counts = own != ignored;
    Value top = tops[row], log_sum = log_sums[row], up = g[row], spread = Value(smoothing / classes), joint = Value(classes);
    if (SMOOTH && w) {
        joint = Value(0);
        Group::walk<VEC>(w, classes, [&](i64 i, Part<VEC> part) {
            Value weight[VEC];
            part.load(weight, w + i, Value(0));
            for (int k = 0; k < VEC; k++) joint += weight[k];
        });
        joint = Group::sum(joint);
    }
    Value share = counts ? weight_of(w, own) * Value(1 - (SMOOTH ? smoothing : 0)) : Value(0);
    Value scale = (SMOOTH ? share + spread * joint : share) * up;
    Group::walk<VEC>(x, classes, [&](i64 i, Part<VEC> part) {
        Value in[VEC], weight[VEC];
        part.load(in, x + i, Value(0));
        if (SMOOTH && w) part.load_any(weight, w + i, Value(0));
        for (int k = 0; k < VEC; k++) {
            Value v = weight_of_exponent((in[k] - top) - log_sum) * scale;
            if (SMOOTH) v -= (w ? spread * weight[k] : spread) * up;
            if (i + k == own) v -= share * up;
            in[k] = counts ? v : Value(0);
        }
        part.store(d + i, in);
    });
}
