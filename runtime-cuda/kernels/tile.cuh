// Products of tiles in shared memory, for attention. Rows go by strips of 16, whose results are spread over a warp as those
// of the tensor cores' m16n8k16 (device.cuh): `float c[N][4]` for N tiles of 8 columns. f16 and bf16 are multiplied by
// tensor cores with f32 sums; f32 by fused multiply-adds over the same tiles, so that all other code is written once. Defines: T,
// HEAD_DIM, and WARPGROUP, which is 1 for halves of a HEAD_DIM that is a multiple of 64 alone.
#ifndef WEFT_TILE
#define WEFT_TILE
#include "common.cuh"

// Whether a block's four warps multiply together, as those of a Hopper can. Tiles are panels of 64 columns then, one after another.
#if WARPGROUP && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TOGETHER true
#else
#define TOGETHER false
#endif

// From one row of a tile to the next: an odd number of 16-byte words, so that 8 rows' words are in different banks. Together, warps
// read rows whose words are permuted instead.
#define TILE_ROW (HEAD_DIM + (TOGETHER ? 0 : 16 / (int)sizeof(T)))
#define COLUMN_TILES (HEAD_DIM / 8)
#define WARPS 4
#define STRIP 16
// Rows of a block: a strip of each warp, which takes all columns. Two strips a warp would read the other operand half as often, but
// leave room for half as many warps: halves are slower so on an H100.
#define BLOCK_ROWS (WARPS * STRIP)
#define THREADS (WARPS * WARP)
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)
// The compiler contracts no products and sums where a program of scores is in the source.
#ifdef PROGRAM
#define ADD_PRODUCT(sum, x, y) sum = fmaf(x, y, sum)
#else
#define ADD_PRODUCT(sum, x, y) sum += x * y
#endif

// The first tile in a block's memory.
DEVICE T* first_tile(unsigned char* memory) {
    return (T*)(TOGETHER ? memory + (1024 - shared_address(memory) % 1024) % 1024 : memory);
}

// The place of the 16 bytes that begin with an element of a tile of `ROWS` rows.
template <int ROWS> DEVICE int place_of(int row, int column) {
    if (!TOGETHER) return row * TILE_ROW + column;
    return column / 64 * ROWS * 64 + row * 64 + (column / 8 % 8 ^ row % 8) * 8;
}

DEVICE int lane_row() { return threadIdx.x % WARP / 4; }
DEVICE int lane_column() { return threadIdx.x % WARP % 4 * 2; }
// The first row of this warp's strip.
DEVICE int warp_row() { return threadIdx.x / WARP * STRIP; }
// The row of element `e` of a strip, and the column of element `e` of tile `n` of scores.
DEVICE int row_of(int e) { return lane_row() + e / 2 * 8; }
DEVICE int column_of(int n, int e) { return n * 8 + lane_column() + e % 2; }

// Starts copying `ROWS` rows from `first` on; rows from `count` on become zeros. The number of rounds is known to the compiler, and a
// round's address is a step from that of the round before: computed anew for each, addresses cost more than products.
template <int ROWS, bool INSIDE> DEVICE void copy_rows(T* to, const T* from, i64 row_step, int first, int count) {
    const int PER = 16 / (int)sizeof(T), WORDS = HEAD_DIM / PER, ALL = ROWS * WORDS, STEP = THREADS / WORDS;
    const bool EVEN = THREADS % WORDS == 0;
    const T* at = from + (first + (int)threadIdx.x / WORDS) * row_step + threadIdx.x % WORDS * PER;
    EACH (round, (ALL + THREADS - 1) / THREADS) {
        int i = round * THREADS + threadIdx.x, row = i / WORDS, column = i % WORDS * PER;
        if (!EVEN) at = from + (first + row) * row_step + column;
        bool wanted = INSIDE || first + row < count;
        if (ALL % THREADS == 0 || i < ALL) copy_async16(to + place_of<ROWS>(row, column), wanted ? at : from, wanted);
        at += STEP * row_step;
    }
}

// Nearly all blocks have all of their rows; kernels by warps lack the registers for a second form.
template <int ROWS> DEVICE void copy_rows(T* to, const T* from, i64 row_step, int first, int count) {
    if (TOGETHER && first + ROWS <= count) copy_rows<ROWS, true>(to, from, row_step, first, count);
    else copy_rows<ROWS, false>(to, from, row_step, first, count);
}

// Double buffering: while step i is in use, step i + 1 is in flight. Copies issued before the call arrive with step 0. One barrier a
// step is enough: the memory that its copies overwrite was in use before it.
template <class Fetch, class Use> DEVICE void pipeline(int steps, Fetch fetch, Use use) {
    if (steps > 0) fetch(0, 0);
    copy_async_commit();
    for (int i = 0; i < steps; i++) {
        copy_async_wait();
        if (TOGETHER) products_see_writes();
        __syncthreads();
        if (i + 1 < steps) fetch(i + 1, (i + 1) % 2);
        copy_async_commit();
        use(i, i % 2);
    }
    copy_async_wait();
}

// The type whose overloads say how tiles are multiplied.
#if WARPGROUP && defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class E> struct Tiles {
    // As below, of all warps' strips at once.
    template <int N> static DEVICE void scores(float (&c)[N][4], const E* a, const E* b) {
        u64 left = tile_descriptor(a), right = tile_descriptor(b);
        hold(c);
        products_begin();
        EACH (k, HEAD_DIM / 16) {
            int panel = k / 4, column = k % 4 * 16;
            product(c, tile_behind(left, panel * BLOCK_ROWS * 64 + column), tile_behind(right, panel * 8 * N * 64 + column), E());
        }
        products_wait();
        hold(c);
    }

    template <int K> static DEVICE void weighted(float (&c)[COLUMN_TILES][4], const float (&p)[K][4], const E* b) {
        u32 left[K / 2][4];
        EACH (k, K / 2)
            EACH (i, 4) left[k][i] = pack2(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1], E());
        u64 right = tile_descriptor(b);
        EACH (k, K / 2) hold(left[k]);
        hold(c);
        products_begin();
        EACH (panel, HEAD_DIM / 64) {
            float(&part)[8][4] = *(float(*)[8][4])c[panel * 8];
            EACH (k, K / 2) product(part, left[k], tile_behind(right, (panel * 8 * K + k * 16) * 64), E());
        }
        products_wait();
        hold(c);
    }

    static DEVICE int dimension_of(int n, int e) { return column_of(n, e); }
};
#else
template <class E> struct Tiles {
    // c += a b^T: this warp's strip of the rows of `a` against 8 N rows of `b`, over the head's dimension.
    template <int N> static DEVICE void scores(float (&c)[N][4], const E* a, const E* b) {
        int lane = threadIdx.x % WARP;
        a += (warp_row() + lane % 16) * TILE_ROW + lane / 16 * 8;
        b += (lane / 16 * 8 + lane % 8) * TILE_ROW + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < HEAD_DIM; k += 16) {
            u32 left[4];
            load_matrices(left, a + k);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 right[4];
                load_matrices(right, b + n * 8 * TILE_ROW + k);
                mma_m16n8k16(c[n], left, right[0], right[1], E());
                mma_m16n8k16(c[n + 1], left, right[2], right[3], E());
            }
        }
    }

    // c += p b: weights of a strip, as `scores` left them, of 8 K rows of `b`. They are rounded to half precision.
    template <int K> static DEVICE void weighted(float (&c)[COLUMN_TILES][4], const float (&p)[K][4], const E* b) {
        int lane = threadIdx.x % WARP;
        b += lane % 16 * TILE_ROW + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            u32 left[4];
            EACH (i, 4) left[i] = pack2(p[k + i / 2][i % 2 * 2], p[k + i / 2][i % 2 * 2 + 1], E());
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n += 2) {
                u32 right[4];
                load_matrices_transposed(right, b + k * 8 * TILE_ROW + n * 8);
                mma_m16n8k16(c[n], left, right[0], right[1], E());
                mma_m16n8k16(c[n + 1], left, right[2], right[3], E());
            }
        }
    }

    // The head's dimension of element `e` of tile `n` of what `weighted` sums; elements 0, 1 and 2, 3 are adjacent.
    static DEVICE int dimension_of(int n, int e) { return column_of(n, e); }
};
#endif

template <> struct Tiles<float> {
    template <int N> static DEVICE void scores(float (&c)[N][4], const float* a, const float* b) {
        a += (warp_row() + lane_row()) * TILE_ROW;
        b += lane_column() * TILE_ROW;
#pragma unroll 4
        for (int k = 0; k < HEAD_DIM; k += 4) {
            float left[2][4], right[4];
            EACH (r, 2) load_pack(left[r], a + r * 8 * TILE_ROW + k);
            EACH (n, N)
                EACH (e, 2) {
                    load_pack(right, b + (n * 8 + e) * TILE_ROW + k);
                    EACH (r, 2)
                        EACH (i, 4) ADD_PRODUCT(c[n][r * 2 + e], left[r][i], right[i]);
                }
        }
    }

    // Every lane needs its rows' weights, which are in the four lanes of a row. Four adjacent columns per lane, not two as the
    // tensor cores have them: one 16-byte load for 8 multiply-adds.
    template <int K> static DEVICE void weighted(float (&c)[COLUMN_TILES][4], const float (&p)[K][4], const float* b) {
        b += lane_column() * 2;
        EACH (k, K)
            EACH (i, 8) {
                float left[2];
                EACH (r, 2) left[r] = __shfl_sync(ALL_LANES, p[k][r * 2 + i % 2], lane_row() * 4 + i / 2);
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n += 2) {
                    float right[4];
                    load_pack(right, b + (k * 8 + i) * TILE_ROW + n * 8);
                    EACH (r, 2)
                        EACH (e, 4) ADD_PRODUCT(c[n + e / 2][r * 2 + e % 2], left[r], right[e]);
                }
            }
    }

    static DEVICE int dimension_of(int n, int e) { return n / 2 * 16 + lane_column() * 2 + n % 2 * 2 + e % 2; }
};

// Stores the rows of a strip, `first ..` below `count`, its upper and lower half scaled.
DEVICE void store_rows(T* to, i64 row_step, int first, int count, const float (&c)[COLUMN_TILES][4], const float (&scale)[2]) {
    EACH (n, COLUMN_TILES)
        EACH (r, 2) {
            int row = first + row_of(2 * r);
            float pair[2] = {c[n][2 * r] * scale[r], c[n][2 * r + 1] * scale[r]};
            if (row < count) store_pack(to + row * row_step + Tiles<T>::dimension_of(n, 2 * r), pair);
        }
}

// ---- Shared by forward and backward.

#define LN_2 0.6931471805599453f

// Strides of [B, H, rows, HEAD_DIM] in elements; the last is 1, all others are multiples of 16 bytes.
struct Heads {
    i64 batch, head, row;
};
// Strides of an additive mask broadcast to [B, H, T, S].
struct Mask {
    i64 batch, head, query, key;
};
// `group` query heads share a key head: `heads` is a multiple of it.
struct Sizes {
    int batches, heads, group, queries, keys;
};
static_assert(sizeof(Heads) == 24 && sizeof(Mask) == 32 && sizeof(Sizes) == 20, "the launcher packs these structures");

#ifdef PROGRAM
// A program of scores, in generated text before this file: `struct Program`, which has the arguments, `program_score`, and
// `program_slope`, of the gradients of a score and of `LEARNED` arguments.
#define PROGRAM_PARAMETER , CONSTANT Program program
#define SCORES(bias, batch, head) Scores(scale, program, batch, head, sizes)

// As below, of a program of a score, its position and arguments.
struct Scores {
    float scale;
    const Program& program;
    int batch, head, queries, keys;

    DEVICE Scores(float scale, const Program& program, int batch, int head, const Sizes& sizes)
        : scale(scale), program(program), batch(batch), head(head), queries(sizes.queries), keys(sizes.keys) {}

    DEVICE bool hides(int query, int key) const {
        return query >= queries || key >= keys || key - query > program.ahead;
    }

    DEVICE float of(float dot, int query, int key) const {
        if (hides(query, key)) return -infinity(0.0f);
        return program_score(program, dot * scale, batch, head, query, key) * LOG2_E;
    }

    // For gradients, which evaluate the program where a weight is computed: together, all programs of a tile take more registers
    // than there are.
    template <bool TURNED, int N> DEVICE float prepare(float (&)[N][4], int, int) const { return 1.0f; }
    DEVICE float exponent(float dot, float, int query, int key) const { return of(dot, query, key); }
    // A slope of a hidden score may be infinite.
    DEVICE float back(float dot, float slope, int query, int key, float (&learned)[LEARNED + 1]) const {
        if (hides(query, key)) {
            EACH (i, LEARNED) learned[i] = 0.0f;
            return 0.0f;
        }
        return program_slope(program, dot * scale, slope, batch, head, query, key, learned);
    }

    // Where sums of the gradients of argument `i` go: [B, H, rows].
    DEVICE float* sums(int i) const { return program.sums[i]; }

    template <bool TURNED, int N> DEVICE float apply(float (&s)[N][4], int row, int column) const {
        EACH (n, N)
            EACH (e, 4) {
                int r = row + row_of(e), c = column + column_of(n, e);
                s[n][e] = TURNED ? of(s[n][e], c, r) : of(s[n][e], r, c);
            }
        return 1.0f;
    }
};
#else
#define LEARNED 0
#define PROGRAM_PARAMETER
#define SCORES(bias, batch, head) Scores(scale, bias, mask_at, sizes, causal)

// The transformation of a head's scores: masked, scaled, and in units of ln 2, so that weights are powers of two.
struct Scores {
    float scale;
    // The mask of this head, or null.
    const T* mask;
    Mask at;
    int queries, keys, causal;

    DEVICE Scores(float scale, const T* mask, const Mask& at, const Sizes& sizes, int causal)
        : scale(scale * LOG2_E), mask(mask), at(at), queries(sizes.queries), keys(sizes.keys), causal(causal) {}

    // -inf where the query does not see the key, or there is none.
    DEVICE float of(float dot, int query, int key) const {
        if (query >= queries || key >= keys || (causal && key > query)) return -infinity(0.0f);
        float score = dot * scale;
        return mask ? score + load(mask[query * at.query + key * at.key]) * LOG2_E : score;
    }

    // Of a strip of rows from `row` on, and columns from `column` on. Rows are queries, or, `TURNED`, keys. Returns what the scores
    // are still to be multiplied by: where nothing is added to them and all exist, the exponent's multiply-add does it.
    template <bool TURNED, int N> DEVICE float apply(float (&s)[N][4], int row, int column) const {
        int end_row = row + STRIP, end_column = column + 8 * N;
        bool exist = TURNED ? end_row <= keys && end_column <= queries : end_row <= queries && end_column <= keys;
        // Keys after a query are hidden from it: none of these, or, at the diagonal, some. The largest score of a row is also the
        // largest once scaled, unless signs change.
        bool hides = causal && (TURNED ? end_row > column + 1 : end_column > row + 1);
        if (exist && !mask && scale > 0.0f) {
            if (!hides) return scale;
            EACH (n, N)
                EACH (e, 4) {
                    int r = row + row_of(e), c = column + column_of(n, e);
                    if (TURNED ? r > c : c > r) s[n][e] = -infinity(0.0f);
                }
            return scale;
        }
        EACH (n, N)
            EACH (e, 4) {
                int r = row + row_of(e), c = column + column_of(n, e);
                s[n][e] = TURNED ? of(s[n][e], c, r) : of(s[n][e], r, c);
            }
        return 1.0f;
    }

    // For gradients: scores as `apply` leaves them, the exponent of a weight, and the gradient of a product from that of its score.
    template <bool TURNED, int N> DEVICE float prepare(float (&s)[N][4], int row, int column) const {
        return apply<TURNED>(s, row, column);
    }
    DEVICE float exponent(float score, float unit, int, int) const { return score * unit; }
    DEVICE float back(float, float slope, int, int, float (&)[1]) const { return slope; }
    DEVICE float* sums(int) const { return nullptr; }
};
#endif

// Sums of the gradients of learned arguments over the columns of a strip's rows: this lane's part of two rows'.
struct Learned {
    float of[LEARNED + 1][2];

    DEVICE Learned() {
        EACH (i, LEARNED)
            EACH (r, 2) of[i][r] = 0.0f;
    }

    DEVICE void add(int r, const float (&x)[LEARNED + 1]) { EACH (i, LEARNED) of[i][r] += x[i]; }

    // Stores the sums of rows `first ..` of `count`, and starts again.
    DEVICE void store(const Scores& scores, i64 line, int first, int count) {
        EACH (i, LEARNED)
            EACH (r, 2) {
                float sum = of[i][r];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                int row = first + row_of(2 * r);
                if (lane_column() == 0 && row < count) scores.sums(i)[line * count + row] = sum;
                of[i][r] = 0.0f;
            }
    }
};

#endif
