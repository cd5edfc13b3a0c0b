// Layer norm and RMS norm over the last axis of contiguous rows, and their gradients.
// Defines: T, LAYER (1: layer norm, 0: RMS norm), ROW_THREADS and VECTOR as in softmax.cu.
// Pointers of absent operands (mean, weight, bias) are null.
#include "common.cuh"

typedef typename Compute<T>::type Value;
typedef Row<ROW_THREADS> Group;

// y = (x - mean) rstd w + b. Variance in a second pass over the row, which is in cache: one pass cancels. The residual of the
// rounded mean corrects both, so that a row of equal elements gives exactly zeros.
KERNEL void norm_rows(T* y, typename Compute<T>::type* rstd, typename Compute<T>::type* mean, const T* x, const T* w, const T* b,
                      i64 rows, i64 width, double eps) {
    i64 row = Group::index();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    Value level = Value(0), left = Value(0), squares = Value(0);
    if (LAYER) {
        Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
            Value in[VEC];
            part.load(in, x + i, Value(0));
            for (int k = 0; k < VEC; k++) level += in[k];
        });
        level = Group::sum(level) / Value(width);
    }
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value in[VEC];
        part.load(in, x + i, level);
        for (int k = 0; k < VEC; k++) {
            left += in[k] - level;
            squares += (in[k] - level) * (in[k] - level);
        }
    });
    Value variance = Group::sum(squares) / Value(width);
    if (LAYER) {
        left = Group::sum(left) / Value(width);
        level += left;
        variance -= left * left;
        variance = variance < Value(0) ? Value(0) : variance;
    }
    Value factor = Value(1) / square_root(variance + Value(eps));
    if (Group::thread() == 0) {
        rstd[row] = factor;
        if (LAYER) mean[row] = level;
    }
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value in[VEC], scale[VEC], shift[VEC];
        part.load(in, x + i, Value(0));
        if (w) part.load_any(scale, w + i, Value(0));
        if (b) part.load_any(shift, b + i, Value(0));
        for (int k = 0; k < VEC; k++) {
            in[k] = (in[k] - level) * factor;
            if (w) in[k] *= scale[k];
            if (b) in[k] += shift[k];
        }
        part.store(y + i, in);
    });
}

// With x^ normalized and h = g w: d = rstd (h - mean(h) - x^ mean(h x^)); no mean(h) for RMS.
KERNEL void norm_grad_rows(T* d, const T* x, const T* g, const typename Compute<T>::type* rstd,
                           const typename Compute<T>::type* mean, const T* w, i64 rows, i64 width) {
    i64 row = Group::index();
    if (row >= rows) return;
    x += row * width;
    g += row * width;
    d += row * width;
    Value factor = rstd[row], level = LAYER ? mean[row] : Value(0);
    Value along = Value(0), offset = Value(0);
    // h at `i`, and the distance of x from the mean.
    auto read = [&](i64 i, Part<VEC> part, Value(&h)[VEC], Value(&in)[VEC]) {
        Value scale[VEC];
        part.load(in, x + i, Value(0));
        part.load(h, g + i, Value(0));
        if (w) part.load_any(scale, w + i, Value(0));
        for (int k = 0; k < VEC; k++) {
            if (w) h[k] *= scale[k];
            in[k] -= level;
        }
    };
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value h[VEC], in[VEC];
        read(i, part, h, in);
        for (int k = 0; k < VEC; k++) {
            along += h[k] * in[k];
            offset += h[k];
        }
    });
    along = Group::sum(along) * factor / Value(width);
    offset = LAYER ? Group::sum(offset) / Value(width) : Value(0);
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value h[VEC], in[VEC];
        read(i, part, h, in);
        for (int k = 0; k < VEC; k++) h[k] = (h[k] - offset - in[k] * factor * along) * factor;
        part.store(d + i, h);
    });
}

#define COLUMN_ROWS 8

// Sums of the weight's and bias' gradients over a group of rows: blockDim = [32, 8], gridDim = [ceil(width / 32), groups];
// `dw`, `db` (null if not given): [groups, width]. Groups depend only on the sizes.
KERNEL void norm_grad_columns(typename Compute<T>::type* dw, typename Compute<T>::type* db, const T* x, const T* g,
                              const typename Compute<T>::type* rstd, const typename Compute<T>::type* mean, i64 rows, i64 width,
                              i64 group) {
    __shared__ Value weights[COLUMN_ROWS][WARP], biases[COLUMN_ROWS][WARP];
    i64 column = (i64)blockIdx.x * WARP + threadIdx.x;
    i64 first = (i64)blockIdx.y * group, end = first + group < rows ? first + group : rows;
    Value weight = Value(0), bias = Value(0);
    for (i64 row = first + threadIdx.y; column < width && row < end; row += COLUMN_ROWS) {
        Value up = load(g[row * width + column]);
        weight += up * ((load(x[row * width + column]) - (LAYER ? mean[row] : Value(0))) * rstd[row]);
        bias += up;
    }
    weights[threadIdx.y][threadIdx.x] = weight;
    biases[threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    for (int r = 1; r < COLUMN_ROWS; r++) {
        weight += weights[r][threadIdx.x];
        bias += biases[r][threadIdx.x];
    }
    i64 to = (i64)blockIdx.y * width + column;
    dw[to] = weight;
    if (db) db[to] = bias;
}

// The groups' sums, in order: one thread per column.
KERNEL void norm_grad_finish(T* out, const typename Compute<T>::type* parts, i64 groups, i64 width) {
    for (i64 column = global_thread(); column < width; column += global_threads()) {
        Value sum = Value(0);
        for (i64 k = 0; k < groups; k++) sum += parts[k * width + column];
        out[column] = Store<T>::of(sum);
    }
}
