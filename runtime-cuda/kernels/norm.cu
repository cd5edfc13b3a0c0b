// Layer norm and RMS norm over the last axis of contiguous rows, and their gradients.
// Defines: T, LAYER (1: layer norm, 0: RMS norm), ROW_THREADS and VECTOR as in softmax.cu, PACKS (how many 16-byte packs of a row a
// thread holds, so that the row is read once; 0: it is read in every pass). Pointers of absent operands (mean, weight, bias) are null.
#include "common.cuh"

typedef typename Compute<T>::type Value;
typedef Row<ROW_THREADS> Group;
typedef HeldRow<Group, T, VEC, PACKS> Held;

// A row's parameters: where rows are held they are aligned too.
DEVICE void load_parameter(Value (&to)[VEC], const T* from, Part<VEC> part) {
    if (PACKS > 0) return load_pack(to, from);
    part.load_any(to, from, Value(0));
}

// y = (x - mean) rstd w + b. Variance in a second pass over the row: one pass cancels. The residual of the rounded mean corrects
// both, so that a row of equal elements gives exactly zeros.
KERNEL void norm_rows(T* y, typename Compute<T>::type* rstd, typename Compute<T>::type* mean, const T* x, const T* w, const T* b,
                      i64 rows, i64 width, double eps) {
    i64 row = Group::index();
    if (row >= rows) return;
    Held held(x + row * width, width);
    y += row * width;
    Value level = Value(0), left = Value(0), squares = Value(0);
    if (LAYER) {
        held.each(Value(0), [&](i64, Part<VEC>, const Value(&in)[VEC]) {
            for (int k = 0; k < VEC; k++) level += in[k];
        });
        level = Group::sum(level) / Value(width);
    }
    held.each(level, [&](i64, Part<VEC>, const Value(&in)[VEC]) {
        for (int k = 0; k < VEC; k++) {
            left += in[k] - level;
            squares += (in[k] - level) * (in[k] - level);
        }
    });
    if (LAYER)
        Group::sums(squares, left);
    else
        squares = Group::sum(squares);
    Value variance = squares / Value(width);
    if (LAYER) {
        left /= Value(width);
        level += left;
        variance -= left * left;
        variance = variance < Value(0) ? Value(0) : variance;
    }
    Value factor = Value(1) / square_root(variance + Value(eps));
    if (Group::thread() == 0) {
        rstd[row] = factor;
        if (LAYER) mean[row] = level;
    }
    held.each(Value(0), [&](i64 i, Part<VEC> part, Value(&in)[VEC]) {
        Value scale[VEC], shift[VEC];
        if (w) load_parameter(scale, w + i, part);
        if (b) load_parameter(shift, b + i, part);
        for (int k = 0; k < VEC; k++) {
            in[k] = (in[k] - level) * factor;
            if (w) in[k] *= scale[k];
            if (b) in[k] += shift[k];
        }
        part.store(y + i, in);
    });
}

// Threads of a column, which has one in every warp of the block.
#define COLUMN_THREADS 8

// Adds the values of a column's threads, in order, for the first.
DEVICE Value column_sum(Value x) {
    __shared__ Value parts[COLUMN_THREADS][WARP];
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    for (int r = 1; threadIdx.y == 0 && r < COLUMN_THREADS; r++) x += parts[r][threadIdx.x];
    return x;
}

// The groups' sums: blockDim = [32, 8], gridDim = [ceil(width / 32), 2 with `db`, else 1]. Gradients are added to what is there where so
// asked.
KERNEL void norm_grad_finish(T* dw, T* db, const typename Compute<T>::type* dw_parts, const typename Compute<T>::type* db_parts,
                             i64 groups, i64 width, int add_dw, int add_db) {
    T* to = blockIdx.y == 0 ? dw : db;
    const Value* parts = blockIdx.y == 0 ? dw_parts : db_parts;
    i64 column = (i64)blockIdx.x * WARP + threadIdx.x;
    Value sum = Value(0);
    // Few threads, which wait for memory: whole rounds come first, whose loads are under way at once.
    const int ROUND = 8;
    i64 k = threadIdx.y, end = column < width ? groups : 0;
    for (; k + (ROUND - 1) * COLUMN_THREADS < end; k += ROUND * COLUMN_THREADS)
        for (int r = 0; r < ROUND; r++) sum += parts[(k + r * COLUMN_THREADS) * width + column];
    for (; k < end; k += COLUMN_THREADS) sum += parts[k * width + column];
    sum = column_sum(sum);
    if (threadIdx.y > 0 || column >= width) return;
    if (blockIdx.y == 0 ? add_dw : add_db) sum += load(to[column]);
    to[column] = Store<T>::of(sum);
}

// The gradients. With x^ normalized and h = g w: d = rstd (h - mean(h) - x^ mean(h x^)), no mean(h) for RMS; dw = sum g x^ and db =
// sum g over rows. With `add`, d is added to what is there.

// From a thread's sums of h (x - mean) and of h: the factor of x - mean, and mean(h).
DEVICE void join(Value& along, Value& offset, Value factor, i64 width) {
    if (LAYER)
        Group::sums(along, offset);
    else
        along = Group::sum(along), offset = Value(0);
    along = along * factor * factor / Value(width);
    offset /= Value(width);
}

#if PACKS > 0

// Rows that a block computes at a time; it has 256 threads.
#define BLOCK_ROWS (256 / ROW_THREADS)

// Stores a block's sums of a parameter's gradient; a warp has those of its own rows.
DEVICE void store_sums(Value* to, const Value (&sums)[PACKS][VEC], i64 width) {
    if (BLOCK_ROWS == 1) {
        for (int j = 0; j < PACKS; j++)
            for (int k = 0; k < VEC; k++)
                if (Held::at(j) < width) to[Held::at(j) + k] = sums[j][k];
        return;
    }
    const int WIDTH = PACKS * VEC * ROW_THREADS;
    __shared__ Value parts[BLOCK_ROWS][WIDTH];
    __syncthreads();
    for (int j = 0; j < PACKS; j++)
        for (int k = 0; k < VEC; k++) parts[threadIdx.y][Held::at(j) + k] = sums[j][k];
    __syncthreads();
    for (int i = threadIdx.y * WARP + threadIdx.x; i < width; i += 256) {
        Value sum = parts[0][i];
        for (int r = 1; r < BLOCK_ROWS; r++) sum += parts[r][i];
        to[i] = sum;
    }
}

// All gradients where there is a weight, reading x and g once: a block has a group of rows, and a thread the same columns of each.
// `dw`, `db` (null if not given): [groups, width], sums over the rows of each group.
KERNEL void __launch_bounds__(256, sizeof(T) == 2 && PACKS < 4 ? 2 : 1)
    norm_grad(T* d, typename Compute<T>::type* dw, typename Compute<T>::type* db, const T* x, const T* g,
              const typename Compute<T>::type* rstd, const typename Compute<T>::type* mean, const T* w, i64 rows, i64 width,
              i64 group, int add) {
    i64 first = (i64)blockIdx.x * group, end = first + group < rows ? first + group : rows;
    Value weights[PACKS][VEC] = {}, biases[PACKS][VEC] = {};
    for (i64 row = first + threadIdx.y; row < end; row += BLOCK_ROWS) {
        T* to = d + row * width;
        Held xs(x + row * width, width), gs(g + row * width, width), before(to, width, add);
        Value factor = rstd[row], level = LAYER ? mean[row] : Value(0);
        Value along = Value(0), offset = Value(0);
        // Of pack `j`: h, g and the distance of x from the mean.
        auto read = [&](int j, Value(&h)[VEC], Value(&up)[VEC], Value(&in)[VEC]) {
            Value scale[VEC];
            xs.get(j, in);
            gs.get(j, up);
            load_pack(scale, w + Held::at(j));
            for (int k = 0; k < VEC; k++) {
                h[k] = up[k] * scale[k];
                in[k] -= level;
            }
        };
        for (int j = 0; j < PACKS; j++) {
            if (!xs.has(j)) continue;
            Value h[VEC], up[VEC], in[VEC];
            read(j, h, up, in);
            for (int k = 0; k < VEC; k++) {
                along += h[k] * in[k];
                offset += h[k];
                weights[j][k] += up[k] * (in[k] * factor);
                biases[j][k] += up[k];
            }
        }
        join(along, offset, factor, width);
        for (int j = 0; j < PACKS; j++) {
            if (!xs.has(j)) continue;
            Value h[VEC], up[VEC], in[VEC];
            read(j, h, up, in);
            if (add) before.get(j, up);
            for (int k = 0; k < VEC; k++) {
                h[k] = (h[k] - offset - in[k] * along) * factor;
                if (add) h[k] += up[k];
            }
            store_pack(to + Held::at(j), h);
        }
    }
    store_sums(dw + blockIdx.x * width, weights, width);
    if (LAYER && db) store_sums(db + blockIdx.x * width, biases, width);
}

#else

KERNEL void norm_grad_rows(T* d, const T* x, const T* g, const typename Compute<T>::type* rstd,
                           const typename Compute<T>::type* mean, const T* w, i64 rows, i64 width, int add) {
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
    join(along, offset, factor, width);
    Group::walk<VEC>(x, width, [&](i64 i, Part<VEC> part) {
        Value h[VEC], in[VEC], before[VEC];
        read(i, part, h, in);
        if (add) part.load(before, d + i, Value(0));
        for (int k = 0; k < VEC; k++) {
            h[k] = (h[k] - offset - in[k] * along) * factor;
            if (add) h[k] += before[k];
        }
        part.store(d + i, h);
    });
}

// Sums of the weight's and bias' gradients over a group of rows: blockDim = [32, 8], gridDim = [ceil(width / 32), groups];
// `dw`, `db` (null if not given): [groups, width]. Groups depend only on the sizes.
KERNEL void norm_grad_columns(typename Compute<T>::type* dw, typename Compute<T>::type* db, const T* x, const T* g,
                              const typename Compute<T>::type* rstd, const typename Compute<T>::type* mean, i64 rows, i64 width,
                              i64 group) {
    i64 column = (i64)blockIdx.x * WARP + threadIdx.x;
    i64 first = (i64)blockIdx.y * group, end = first + group < rows ? first + group : rows;
    Value weight = Value(0), bias = Value(0);
    for (i64 row = first + threadIdx.y; column < width && row < end; row += COLUMN_THREADS) {
        Value up = load(g[row * width + column]);
        weight += up * ((load(x[row * width + column]) - (LAYER ? mean[row] : Value(0))) * rstd[row]);
        bias += up;
    }
    weight = column_sum(weight);
    bias = column_sum(bias);
    if (threadIdx.y > 0 || column >= width) return;
    i64 to = (i64)blockIdx.y * width + column;
    dw[to] = weight;
    if (db) db[to] = bias;
}
#endif
