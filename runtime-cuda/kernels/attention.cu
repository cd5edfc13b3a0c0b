// Scaled dot-product attention in blocks with an online softmax (Dao 2023): softmax(q k^T scale + mask) v, and the scores'
// logsumexp. Defines: T (f16, bf16, float), HEAD_DIM (a multiple of 16).
#include "tile.cuh"

// Keys of a block.
#define KEYS (sizeof(T) == 2 ? 64 : 32)

// Strips of a warp.
#define WARP_STRIPS 2
// Blocks that a multiprocessor is to hold: registers are limited for them, where that spills next to nothing.
#define RESIDENT (sizeof(T) == 2 && HEAD_DIM <= 64 ? 3 : 1)
typedef Share<WARP_STRIPS> Own;

// Running softmaxes: their rows' largest scores, and this lane's part of their sums.
struct Online {
    float top[WARP_STRIPS][2], sum[WARP_STRIPS][2];

    // Takes a row's new largest score; returns the factor that rescales its earlier sums.
    DEVICE float raise(int m, int r, float next) {
        float base = finite_or_zero(next), factor = top[m][r] == next ? 1.0f : exp2_flushed(top[m][r] - base);
        top[m][r] = next;
        sum[m][r] *= factor;
        return factor;
    }

    // Turns scores, each still to be multiplied by `unit`, into weights; returns the factor that rescales earlier sums. A score that is
    // NaN has no part in the largest, and gives a weight that is NaN.
    template <int N> DEVICE void weigh(float (&s)[WARP_STRIPS][N][4], float unit, float (&factor)[WARP_STRIPS][2]) {
        EACH (m, WARP_STRIPS)
            EACH (r, 2) {
                float largest = s[m][0][2 * r];
                EACH (n, N) largest = fmaxf(largest, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
                float next = fmaxf(top[m][r], largest * unit);
                factor[m][r] = raise(m, r, next);
                float base = finite_or_zero(next);
                EACH (n, N)
                    EACH (e, 2) {
                        float& weight = s[m][n][2 * r + e];
                        weight = exp2_flushed(weight * unit - base);
                        sum[m][r] += weight;
                    }
            }
    }
};

// After the first steps most have no score that is larger than all before.
DEVICE void shrink(float (&sums)[WARP_STRIPS][COLUMN_TILES][4], const float (&factor)[WARP_STRIPS][2]) {
    bool any = false;
    EACH (m, WARP_STRIPS)
        EACH (r, 2) any |= factor[m][r] != 1.0f;
    if (!any) return;
    EACH (m, WARP_STRIPS)
        EACH (n, COLUMN_TILES)
            EACH (e, 4) sums[m][n][e] *= factor[m][e / 2];
}

// gridDim = [ceil(queries / 64) * heads * batches], blockDim = [128], shared memory (64 + 4 KEYS) * (HEAD_DIM * sizeof(T) + 16)
// bytes. A block of four query tiles walks the keys. `lse`: [B, H, T], contiguous. A query that sees no key gives zeros and
// -inf.
KERNEL void __launch_bounds__(THREADS, RESIDENT)
    attention(T* o, float* lse, const T* q, const T* k, const T* v, const T* mask, CONSTANT Heads o_at, CONSTANT Heads q_at,
              CONSTANT Heads k_at, CONSTANT Heads v_at, CONSTANT Mask mask_at, CONSTANT Sizes sizes, int causal, float scale) {
    DYNAMIC_SHARED(memory);
    T* q_tile = (T*)memory;
    T* k_tiles = q_tile + STRIPS * TILE_ROW;
    T* v_tiles = k_tiles + 2 * KEYS * TILE_ROW;

    // The last queries first: with a causal mask they have most to do.
    int blocks = (sizes.queries + STRIPS - 1) / STRIPS, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * STRIPS;
    int line = blockIdx.x / blocks, head = line % sizes.heads, batch = line / sizes.heads, kv = head / sizes.group;
    k += batch * k_at.batch + kv * k_at.head;
    v += batch * v_at.batch + kv * v_at.head;
    if (mask) mask += batch * mask_at.batch + head * mask_at.head;
    copy_rows<STRIPS>(q_tile, q + batch * q_at.batch + head * q_at.head, q_at.row, first, sizes.queries);

    int visible = causal && first + STRIPS < sizes.keys ? first + STRIPS : sizes.keys;
    int row = Own::row();
    Scores scores(scale, mask, mask_at, sizes, causal);
    Online rows;
    EACH (m, WARP_STRIPS)
        EACH (r, 2) rows.top[m][r] = -infinity(0.0f), rows.sum[m][r] = 0.0f;
    float sums[WARP_STRIPS][COLUMN_TILES][4] = {}, factor[WARP_STRIPS][2];

    auto fetch = [&](int i, int stage) {
        copy_rows<KEYS>(k_tiles + stage * KEYS * TILE_ROW, k, k_at.row, i * KEYS, sizes.keys);
        copy_rows<KEYS>(v_tiles + stage * KEYS * TILE_ROW, v, v_at.row, i * KEYS, sizes.keys);
    };
    auto use = [&](int i, int stage) {
        int column = Own::column(KEYS), from = (stage * KEYS + column) * TILE_ROW;
        float s[WARP_STRIPS][KEYS / WARP_STRIPS / 8][4] = {};
        Tiles<T>::scores(s, q_tile + row * TILE_ROW, k_tiles + from);
        float unit = scores.apply<false>(s, first + row, i * KEYS + column);
        rows.weigh(s, unit, factor);
        shrink(sums, factor);
        Tiles<T>::weighted(sums, s, v_tiles + from);
    };
    pipeline((visible + KEYS - 1) / KEYS, fetch, use);

    // Both parts relative to the larger top, then together.
    float* scratch = (float*)memory;
    float share[WARP_STRIPS][2];
    EACH (m, WARP_STRIPS)
        EACH (r, 2) factor[m][r] = rows.raise(m, r, larger(rows.top[m][r], Own::other(rows.top[m][r], scratch)));
    shrink(sums, factor);
    Own::join(sums, scratch);
    EACH (m, WARP_STRIPS)
        EACH (r, 2) {
            float sum = rows.sum[m][r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (WARP_STRIPS > 1) sum += Own::other(sum, scratch);
            share[m][r] = sum == 0.0f ? 0.0f : 1.0f / sum;
            int query = first + row + m * STRIP + row_of(2 * r);
            if (Own::owns() && lane_column() == 0 && query < sizes.queries)
                lse[(i64)line * sizes.queries + query] = (finite_or_zero(rows.top[m][r]) + log2f(sum)) * LN_2;
        }
    if (!Own::owns()) return;
    store_rows(o + batch * o_at.batch + head * o_at.head, o_at.row, first + row, sizes.queries, sums, share);
}
