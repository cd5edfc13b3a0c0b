// One variant of norm.cu.
namespace CASE {
#include "../norm.cu"

static void run(i64 rows, i64 width, bool weighted, bool biased, double shift) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(rows) + "x" + std::to_string(width);
    typedef Compute<T>::type C;
    const double eps = 1e-5;
    Memory<T> x = Memory<T>::normal(rows * width), g = Memory<T>::normal(rows * width), w = Memory<T>::normal(width),
              b = Memory<T>::normal(width);
    for (i64 i = 0; i < rows * width; i++) x[i] = element<T>(number(x[i]) + shift);
    if (rows > 2) x[2 * width] = element<T>(NAN);
    if (rows > 3) x[3 * width + width / 2] = element<T>(-INFINITY);
    auto xs = x.numbers(), gs = g.numbers(), ws = w.numbers(), bs = b.numbers();
    std::vector<double> y(rows * width), d(rows * width), rstd(rows), mean(rows), dw(width), db(width);
    for (i64 r = 0; r < rows; r++) {
        double sum = 0, squares = 0, along = 0, level = 0;
        for (i64 i = 0; i < width; i++) sum += xs[r * width + i];
        double m = LAYER ? sum / width : 0;
        // The residual of an infinite mean is no number.
        mean[r] = std::isinf(m) ? NAN : m;
        for (i64 i = 0; i < width; i++) squares += (xs[r * width + i] - m) * (xs[r * width + i] - m);
        double s = rstd[r] = 1 / std::sqrt(squares / width + eps);
        for (i64 i = 0; i < width; i++) {
            i64 at = r * width + i;
            double hat = (xs[at] - m) * s, h = gs[at] * (weighted ? ws[i] : 1);
            y[at] = hat * (weighted ? ws[i] : 1) + (biased ? bs[i] : 0);
            along += h * hat / width;
            level += LAYER ? h / width : 0;
            dw[i] += gs[at] * hat;
            db[i] += gs[at];
        }
        for (i64 i = 0; i < width; i++) {
            i64 at = r * width + i;
            d[at] = s * (gs[at] * (weighted ? ws[i] : 1) - level - (xs[at] - m) * s * along);
        }
    }
    const T *wp = weighted ? (T*)w : nullptr, *bp = biased ? (T*)b : nullptr;
    Memory<T> yo(rows * width), dx(rows * width), old = Memory<T>::normal(rows * width), sum_w(width), sum_b(width),
        old_w = Memory<T>::normal(width), old_b = Memory<T>::normal(width);
    Memory<C> ro(rows), mo(rows), ri(rstd), mi(mean);
    // Not a multiple of the rows that a block has at a time.
    i64 group = 10, groups = (rows + group - 1) / group;
    Memory<C> pw(groups * width), pb(groups * width);
    C* mean_out = LAYER ? (C*)mo : nullptr;
    const C* mean_in = LAYER ? (C*)mi : nullptr;
    dim3 block = ROW_THREADS == 32 ? dim3(32, 4) : dim3(ROW_THREADS), grid = ROW_THREADS == 32 ? blocks(rows, 4) : dim3(rows);
    double fine = unit_of<C>() * 30 * (1 + std::abs(shift)), tolerance = unit_of<T>() + fine;
    in_orders([&](int order) {
        if (rows > 0) {
            emulator::launch(order, grid, block, 0, [&] { norm_rows(yo, ro, mean_out, x, wp, bp, rows, width, eps); });
            compare(what + " y", yo.numbers(), y, tolerance);
            compare(what + " rstd", ro.numbers(), rstd, fine);
            if (LAYER) compare(what + " mean", mo.numbers(), mean, fine);
        }
        for (int add = 0; add < 2; add++) {
            auto fill = [&](const Memory<T>& to, const Memory<T>& from, std::vector<double> want) {
                for (size_t i = 0; i < to.size; i++) {
                    to[i] = add ? from[i] : element<T>(NAN);
                    if (add) want[i] += number(from[i]);
                }
                return want;
            };
            auto want = fill(dx, old, d), want_w = fill(sum_w, old_w, dw), want_b = fill(sum_b, old_b, db);
            C* to_b = biased ? (C*)pb : nullptr;
#if PACKS
            dim3 threads = ROW_THREADS == 32 ? dim3(32, 8) : dim3(256);
            emulator::launch(order, dim3(groups), threads, 0,
                             [&] { norm_grad(dx, pw, to_b, x, g, ri, mean_in, wp, rows, width, group, add); });
#else
            if (rows > 0) {
                emulator::launch(order, grid, block, 0, [&] { norm_grad_rows(dx, x, g, ri, mean_in, wp, rows, width, add); });
                dim3 columns((width + 31) / 32, groups);
                emulator::launch(order, columns, dim3(32, 8), 0,
                                 [&] { norm_grad_columns(pw, to_b, x, g, ri, mean_in, rows, width, group); });
            }
#endif
            compare(what + " dx", dx.numbers(), want, tolerance);
            // Each parameter is added to, or overwritten, by itself.
            if (add) want_w = dw;
            emulator::launch(order, dim3((width + 31) / 32, biased ? 2 : 1), dim3(32, 8), 0,
                             [&] { norm_grad_finish(sum_w, sum_b, pw, pb, groups, width, 0, add); });
            compare(what + " dw", sum_w.numbers(), want_w, tolerance, rows + 1);
            if (biased) compare(what + " db", sum_b.numbers(), want_b, tolerance, rows + 1);
        }
    });
}

static Test test([] {
#if PACKS
    // The most that threads hold, and the least: a last pack that one thread has.
    const i64 most = PACKS * ROW_THREADS * VEC, least = most - (ROW_THREADS - 1) * VEC;
    run(19, most, true, LAYER, 0);
    run(5, least, true, false, 3);
    run(1, most - VEC, true, LAYER, 0);
#else
    run(19, 264, true, LAYER, 0);
    run(5, 1037, false, false, 3);
    run(9, 13, true, LAYER, 0);
    // More groups than a thread sums in a round.
    run(700, 13, true, LAYER, 0);
    run(1, 8, true, false, 0);
    run(4, 1, true, LAYER, 0);
    run(0, 5, true, LAYER, 0);
#endif
});
}  // namespace CASE
#undef CASE
#undef T
#undef LAYER
#undef ROW_THREADS
#undef VECTOR
#undef PACKS
#undef BLOCK_ROWS
