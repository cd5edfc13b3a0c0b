// gather.cu and scatter_add.cu of one type; scatters by sorted pairs with the key type K.
namespace CASE {
namespace adding {
#define ACCUMULATE 1
#include "../gather.cu"
#undef ACCUMULATE
}  // namespace adding
namespace plain {
#define ACCUMULATE 0
#include "../gather.cu"
#undef ACCUMULATE
}  // namespace plain
#include "../radix.cu"
#include "../scatter_add.cu"

typedef Compute<T>::type C;

// Small integers, whose sums are exact in every type, in any order of additions.
static Memory<T> whole(size_t n) {
    std::vector<double> v(n);
    for (auto& x : v) x = (double)rng.below(std::is_same_v<T, b8> ? 2 : 4);
    return Memory<T>(v);
}

// out [A, N, W] = x [A, S, W] along axis 1, index [A, N, W] or [A, N, 1] (columns share it). x is stored as [W, S, A].
static void run(i64 a, i64 s, i64 n, i64 w, bool shared, bool wrong) {
    std::string what = std::string(__PRETTY_FUNCTION__) + (shared ? " shared" : " each");
    Memory<T> x = whole(a * s * w), old = whole(a * n * w), src = whole(a * n * w), base = whole(a * s * w);
    Memory<i64> index(a * n * (shared ? 1 : w));
    for (size_t i = 0; i < index.size; i++) index[i] = rng.below(4) ? rng.below(s) : 0;
    if (wrong) index[index.size / 2] = s, index[0] = -1;
    i64 ia = n * (shared ? 1 : w), in = shared ? 1 : w, iw = shared ? 0 : 1;
    auto xs = x.numbers(), olds = old.numbers(), srcs = src.numbers(), sums = base.numbers();
    std::vector<double> added = olds, plain_want = olds;
    const bool truth = std::is_same_v<T, b8>;
    for (i64 i = 0; i < a; i++)
        for (i64 j = 0; j < n; j++)
            for (i64 k = 0; k < w; k++) {
                i64 to = index[i * ia + j * in + k * iw], at = (i * n + j) * w + k;
                if (to < 0 || to >= s) continue;
                double v = xs[(k * s + to) * a + i];
                added[at] = truth ? olds[at] || v : olds[at] + v;
                plain_want[at] = v;
                double& sum = sums[(k * s + to) * a + i];
                sum = truth ? sum || srcs[at] : sum + srcs[at];
            }
    Memory<u32> flag(1);
    std::vector<double> flagged{(double)(wrong ? FLAG_GATHER : 0)}, scattered{(double)(wrong ? FLAG_SCATTER_ADD : 0)};
    Memory<T> out(a * n * w), far(a * s * w);
    Strided near = strided({a, n, w}, {n * w, w, 1}), at_x = strided({a, n, w}, {1, 0, s * a}),
            at_index = strided({a, n, w}, {ia, in, iw});
    in_orders([&](int order) {
        flag[0] = 0;
        memcpy(out, old, out.size * sizeof(T));
        emulator::launch(order, blocks(out.size, 600), dim3(256), 0,
                         [&] { adding::gather(out, x, index, near, at_x, at_index, out.size, a, s, flag); });
        compare(what + " gather added", out.numbers(), added, 0);
        compare(what + " gather flag", flag.numbers(), flagged, 0);
        memcpy(out, old, out.size * sizeof(T));
        emulator::launch(order, blocks(out.size, 256), dim3(256), 0,
                         [&] { plain::gather(out, x, index, near, at_x, at_index, out.size, a, s, flag); });
        compare(what + " gather", out.numbers(), plain_want, 0);

        // One thread per line.
        flag[0] = 0;
        memcpy(far, base, far.size * sizeof(T));
        Strided lines_src = strided({a, w}, {n * w, 1}), lines_out = strided({a, w}, {1, s * a}),
                lines_index = strided({a, w}, {ia, iw});
        emulator::launch(order, blocks(a * w, 256), dim3(256), 0,
                         [&] { scatter_lines(far, src, index, lines_src, lines_out, lines_index, a * w, n, w, in, s, a, flag); });
        compare(what + " scatter lines", far.numbers(), sums, 0);
        compare(what + " scatter lines flag", flag.numbers(), scattered, 0);

        // Sorted pairs. Lines are [A] with columns [W], or [A, W] with none.
        flag[0] = 0;
        memcpy(far, base, far.size * sizeof(T));
        i64 lines = shared ? a : a * w, count = lines * n, columns = shared ? w : 1;
        Strided pairs_index = shared ? strided({a, n}, {ia, in}) : strided({a, w, n}, {ia, iw, in});
        Strided pairs_src = shared ? strided({a, n}, {n * w, w}) : strided({a, w, n}, {n * w, 1, w});
        Strided line_out = shared ? strided({a}, {1}) : strided({a, w}, {1, s * a});
        Strided column_src = shared ? strided({w}, {1}) : strided({}, {}),
                column_out = shared ? strided({w}, {s * a}) : strided({}, {});
        u32 tiles = (count + 2047) / 2048;
        Memory<K> keys(count), keys2(count);
        Memory<u32> pairs(count), pairs2(count), counts(16 * tiles);
        emulator::launch(order, blocks(count, 256), dim3(256), 0,
                         [&] { scatter_keys(keys, pairs, index, pairs_index, count, n, s, flag); });
        K *from = keys, *to = keys2;
        u32 *pairs_from = pairs, *pairs_to = pairs2;
        // One more than the largest key there is: the mark of a pair out of range has all bits set, also within these.
        int bits = 1;
        while (lines * s >> bits) bits++;
        for (int shift = 0; shift < bits; shift += 4) {
            emulator::launch(order, dim3(tiles), dim3(256), 0, [&] { radix_count(counts, from, count, shift); });
            emulator::launch(order, dim3(1), dim3(256), 0, [&] { radix_places(counts, 16 * tiles); });
            emulator::launch(order, dim3(tiles), dim3(256), 0,
                             [&] { radix_move(to, pairs_to, from, pairs_from, counts, count, shift); });
            std::swap(from, to), std::swap(pairs_from, pairs_to);
        }
        emulator::launch(order, dim3((columns + 31) / 32, (count + 7) / 8), dim3(32, 4), 0, [&] {
            scatter_segments(far, src, from, pairs_from, pairs_src, line_out, column_src, column_out, count, columns, s, a);
        });
        compare(what + " scatter segments", far.numbers(), sums, 0);
        compare(what + " scatter segments flag", flag.numbers(), scattered, 0);
    });
}

static Test test([] {
    run(2, 5, 13, 35, true, false);
    run(3, 7, 9, 4, false, true);
    run(1, 3, 5, 1, false, false);
    if (std::is_same_v<T, float>) {
        run(1, 40, 2100, 3, true, true);
        run(1, 300, 2500, 1, true, false);
    }
});
}  // namespace CASE
#undef CASE
#undef T
#undef K
#undef THREADS
#undef ITEMS
#undef TILE
#undef DIGITS
