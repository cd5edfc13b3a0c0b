// Scaled dot-product attention in blocks with an online softmax (Dao 2023): softmax(q k^T scale + mask) v, and the scores'
// logsumexp. Defines: T (f16, bf16, float), HEAD_DIM (a multiple of 16).
#include "tile.cuh"

// Keys of a block.
#define KEYS (sizeof(T) == 2 ? 64 : 32)
#define KEY_TILES (KEYS / 8)

// A strip's running softmax: its two rows' largest score, and this lane's part of their sums.
struct Online {
    float top[2], sum[2];

    // Turns scores into weights; returns by what earlier sums shrink.
    DEVICE void weigh(float (&s)[KEY_TILES][4], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float next = top[r];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) next = larger(next, larger(s[n][2 * r], s[n][2 * r + 1]));
            next = larger(next, __shfl_xor_sync(ALL_LANES, next, 1));
            next = larger(next, __shfl_xor_sync(ALL_LANES, next, 2));
            float base = finite_or_zero(next);
            factor[r] = top[r] == next ? 1.0f : exp2f(top[r] - base);
            top[r] = next;
            sum[r] *= factor[r];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = exp2f(s[n][e] - base);
                    sum[r] += s[n][e];
                }
            }
        }
    }
};

// gridDim = [ceil(queries / 64) * heads * batches], blockDim = [128], shared memory (64 + 4 KEYS) * (HEAD_DIM * sizeof(T) + 16)
// bytes. A block of four strips of queries walks the keys. `lse`: [B, H, T], contiguous. A query that sees nothing gives zeros and
// -inf.
KERNEL void __launch_bounds__(THREADS)
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
    int strip = threadIdx.x / WARP * STRIP;
    Scores scores(scale, mask, mask_at, sizes, causal);
    Online rows = {{-infinity(0.0f), -infinity(0.0f)}, {0.0f, 0.0f}};
    float sums[COLUMN_TILES][4] = {};

    auto fetch = [&](int i, int stage) {
        copy_rows<KEYS>(k_tiles + stage * KEYS * TILE_ROW, k, k_at.row, i * KEYS, sizes.keys);
        copy_rows<KEYS>(v_tiles + stage * KEYS * TILE_ROW, v, v_at.row, i * KEYS, sizes.keys);
    };
    auto use = [&](int i, int stage) {
        float s[KEY_TILES][4] = {}, factor[2];
        Tiles<T>::scores(s, q_tile + strip * TILE_ROW, k_tiles + stage * KEYS * TILE_ROW);
        scores.apply<false>(s, first + strip, i * KEYS);
        rows.weigh(s, factor);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sums[n][e] *= factor[e / 2];
        }
        Tiles<T>::weighted(sums, s, v_tiles + stage * KEYS * TILE_ROW);
    };
    pipeline((visible + KEYS - 1) / KEYS, fetch, use);

    float share[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        share[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
        int query = first + strip + row_of(2 * r);
        if (lane_column() == 0 && query < sizes.queries)
            lse[(i64)line * sizes.queries + query] = (finite_or_zero(rows.top[r]) + log2f(sum)) * LN_2;
    }
    store_rows(o + batch * o_at.batch + head * o_at.head, o_at.row, first + strip, sizes.queries, sums, share[0], share[1]);
}
