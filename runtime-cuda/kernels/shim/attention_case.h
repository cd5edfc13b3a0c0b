// One variant of attention.cu and attention_grad.cu.
namespace CASE {
#include "../attention.cu"
#include "../attention_grad.cu"

struct Options {
    int batches, heads, group, queries, keys;
    int causal;
    // 0: none, 1: [1, 1, T, S], 2: [B, 1, 1, S]; the second hides every key from a batch.
    int mask;
    // Rows of heads are interleaved: [B, T, H, D].
    bool interleaved;
};

// A tensor [B, H, N, HEAD_DIM] and its strides.
struct Tensor {
    Heads at;
    Memory<T> data;
    Tensor(int batches, int heads, int n, bool interleaved, double scale = 1)
        : at{(i64)heads * n * HEAD_DIM, interleaved ? HEAD_DIM : (i64)n * HEAD_DIM, interleaved ? heads * HEAD_DIM : HEAD_DIM},
          data(Memory<T>::normal((size_t)batches * heads * n * HEAD_DIM, scale)) {}
    double get(int b, int h, int i, int c) const { return number(data[b * at.batch + h * at.head + i * at.row + c]); }
    // In the order of the strides, as the reference has it.
    std::vector<double> dense(int batches, int heads, int n) const {
        std::vector<double> v;
        for (int b = 0; b < batches; b++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < n; i++)
                    for (int c = 0; c < HEAD_DIM; c++) v.push_back(get(b, h, i, c));
        return v;
    }
};

static double largest(const std::vector<double>& v) {
    double top = 0.5;
    for (double x : v) top = std::max(top, std::abs(x));
    return top;
}

static void run(const Options& p, double scale) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " T" + std::to_string(p.queries) + " S" + std::to_string(p.keys) +
                       (p.causal ? " causal" : "") + (p.mask ? " mask" : "");
    int kvs = p.heads / p.group;
    Tensor q(p.batches, p.heads, p.queries, p.interleaved), k(p.batches, kvs, p.keys, p.interleaved),
        v(p.batches, kvs, p.keys, p.interleaved), g(p.batches, p.heads, p.queries, p.interleaved),
        o(p.batches, p.heads, p.queries, false), dq(p.batches, p.heads, p.queries, false), dk(p.batches, kvs, p.keys, false),
        dv(p.batches, kvs, p.keys, false), out(p.batches, p.heads, p.queries, false);
    const double inf = std::numeric_limits<double>::infinity();
    std::vector<double> bias(p.mask == 2 ? p.batches * p.keys : (size_t)p.queries * p.keys);
    for (auto& x : bias) x = rng.unit() < 0.2 ? -inf : rng.normal();
    if (p.mask == 2) std::fill(bias.begin(), bias.begin() + p.keys, -inf);
    Memory<T> mask(bias);
    Mask mask_at = p.mask == 2 ? Mask{p.keys, 0, 0, 1} : Mask{0, 0, p.keys, 1};

    // Forward and backward by the formulas, in double precision, from the values as stored.
    size_t rows = (size_t)p.batches * p.heads * p.queries;
    std::vector<double> want_o, want_lse, want_dots, want_dq, want_dk((size_t)p.batches * kvs * p.keys * HEAD_DIM),
        want_dv = want_dk;
    for (int b = 0; b < p.batches; b++)
        for (int h = 0; h < p.heads; h++)
            for (int t = 0; t < p.queries; t++) {
                int kv = h / p.group;
                std::vector<double> s(p.keys, -inf), row(HEAD_DIM), back(HEAD_DIM);
                double top = -inf, sum = 0, dot = 0;
                for (int j = 0; j < p.keys; j++) {
                    if (p.causal && j > t) continue;
                    double x = 0;
                    for (int c = 0; c < HEAD_DIM; c++) x += q.get(b, h, t, c) * k.get(b, kv, j, c);
                    s[j] = x * scale + (p.mask ? number(mask[b * mask_at.batch + t * mask_at.query + j]) : 0);
                    top = std::max(top, s[j]);
                }
                top = finite_or_zero(top);
                for (int j = 0; j < p.keys; j++) sum += std::exp(s[j] - top);
                want_lse.push_back(top + std::log(sum));
                std::vector<double> dp(p.keys);
                for (int j = 0; j < p.keys; j++) {
                    s[j] = sum == 0 ? 0 : std::exp(s[j] - top) / sum;
                    for (int c = 0; c < HEAD_DIM; c++) {
                        row[c] += s[j] * v.get(b, kv, j, c);
                        dp[j] += g.get(b, h, t, c) * v.get(b, kv, j, c);
                    }
                    dot += s[j] * dp[j];
                }
                for (int j = 0; j < p.keys; j++)
                    for (int c = 0; c < HEAD_DIM; c++) {
                        double ds = s[j] * (dp[j] - dot) * scale;
                        size_t at = (((size_t)b * kvs + kv) * p.keys + j) * HEAD_DIM + c;
                        back[c] += ds * k.get(b, kv, j, c);
                        want_dk[at] += ds * q.get(b, h, t, c);
                        want_dv[at] += s[j] * g.get(b, h, t, c);
                    }
                want_o.insert(want_o.end(), row.begin(), row.end());
                want_dq.insert(want_dq.end(), back.begin(), back.end());
                want_dots.push_back(0);
                for (int c = 0; c < HEAD_DIM; c++) want_dots.back() += g.get(b, h, t, c) * number(element<T>(row[c]));
            }
    for (size_t i = 0; i < want_o.size(); i++) out.data[i] = element<T>(want_o[i]);

    Memory<float> lse(rows), dots(rows), lse_in(want_lse), dots_in(want_dots);
    ::dim3 queries((p.queries + 63) / 64 * p.heads * p.batches), keys((p.keys + 63) / 64 * kvs * p.batches), threads(128);
    size_t row = HEAD_DIM * sizeof(T) + 16;
    Sizes sizes{p.batches, p.heads, p.group, p.queries, p.keys};
    const T* m = p.mask ? (const T*)mask : nullptr;
    // Weights and the operands they multiply are rounded: a few units of the largest result.
    double tolerance = 2.5 * unit_of<T>() + 1e-6;
    in_orders([&](int order) {
        emulator::launch(order, queries, threads, (64 + 4 * KEYS) * row, [&] {
            attention(o.data, lse, q.data, k.data, v.data, m, o.at, q.at, k.at, v.at, mask_at, sizes, p.causal, (float)scale);
        });
        compare(what + " o", o.dense(p.batches, p.heads, p.queries), want_o, tolerance, largest(want_o));
        compare(what + " lse", lse.numbers(), want_lse, 2e-6);
        emulator::launch(order, blocks(rows, 128 / DOT_LANES), ::dim3(32, 4), 0,
                         [&] { attention_dots(dots, g.data, out.data, g.at, out.at, sizes); });
        compare(what + " dots", dots.numbers(), want_dots, 2e-6, largest(want_dots));
        if (p.keys > 0) {
            emulator::launch(order, keys, threads, (128 + 4 * BLOCK) * row, [&] {
                attention_grad_keys(dk.data, dv.data, g.data, q.data, k.data, v.data, m, lse_in, dots_in, dk.at, dv.at, g.at, q.at,
                                    k.at, v.at, mask_at, sizes, p.causal, (float)scale);
            });
            compare(what + " dk", dk.dense(p.batches, kvs, p.keys), want_dk, tolerance, largest(want_dk));
            compare(what + " dv", dv.dense(p.batches, kvs, p.keys), want_dv, tolerance, largest(want_dv));
        }
        emulator::launch(order, queries, threads, (128 + 4 * BLOCK) * row, [&] {
            attention_grad_queries(dq.data, g.data, q.data, k.data, v.data, m, lse_in, dots_in, dq.at, g.at, q.at, k.at, v.at,
                                   mask_at, sizes, p.causal, (float)scale);
        });
        compare(what + " dq", dq.dense(p.batches, p.heads, p.queries), want_dq, tolerance, largest(want_dq));
    });
}

static Test test([] {
    double scale = 1 / std::sqrt((double)HEAD_DIM);
    run({1, 2, 2, 70, 45, 0, 0, false}, scale);
    run({1, 1, 1, 83, 131, 1, 0, true}, scale);
    run({2, 2, 1, 17, 33, 0, 2, true}, scale);
    if (HEAD_DIM == 32) {
        run({1, 1, 1, 130, 40, 1, 1, false}, 0.3);
        // Where signs change, and where all scores are equal.
        run({1, 1, 1, 64, 64, 1, 0, false}, -0.3);
        run({1, 1, 1, 64, 64, 1, 0, false}, 0);
        run({1, 4, 2, 1, 1, 1, 0, false}, scale);
        run({1, 1, 1, 3, 0, 0, 0, false}, scale);
    }
});
}  // namespace CASE
#undef CASE
#undef T
#undef HEAD_DIM
#undef WEFT_TILE
