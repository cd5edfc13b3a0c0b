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
    auto xs = x.numbers(), gs = g.numbers(), ws = w.numbers(), bs = b.numbers();
    std::vector<double> y(rows * width), d(rows * width), rstd(rows), mean(rows), dw(width), db(width);
    for (i64 r = 0; r < rows; r++) {
        double sum = 0, squares = 0, along = 0, level = 0;
        for (i64 i = 0; i < width; i++) sum += xs[r * width + i];
        double m = mean[r] = LAYER ? sum / width : 0;
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
    Memory<T> yo(rows * width), dx(rows * width), sum_w(width), sum_b(width);
    Memory<C> ro(rows), mo(rows), ri(rstd), mi(mean);
    i64 group = 7, groups = (rows + group - 1) / group;
    Memory<C> pw(groups * width), pb(groups * width);
    const T *wp = weighted ? (T*)w : nullptr, *bp = biased ? (T*)b : nullptr;
    C* mean_out = LAYER ? (C*)mo : nullptr;
    const C* mean_in = LAYER ? (C*)mi : nullptr;
    dim3 block = ROW_THREADS == 32 ? dim3(32, 4) : dim3(ROW_THREADS), grid = ROW_THREADS == 32 ? blocks(rows, 4) : dim3(rows);
    double fine = unit_of<C>() * 30 * (1 + std::abs(shift)), tolerance = unit_of<T>() + fine;
    in_orders([&](int order) {
        emulator::launch(order, grid, block, 0, [&] { norm_rows(yo, ro, mean_out, x, wp, bp, rows, width, eps); });
        compare(what + " y", yo.numbers(), y, tolerance);
        compare(what + " rstd", ro.numbers(), rstd, fine);
        if (LAYER) compare(what + " mean", mo.numbers(), mean, fine);
        emulator::launch(order, grid, block, 0, [&] { norm_grad_rows(dx, x, g, ri, mean_in, wp, rows, width); });
        compare(what + " dx", dx.numbers(), d, tolerance);
        dim3 columns((width + 31) / 32, groups);
        emulator::launch(order, columns, dim3(32, 8), 0,
                         [&] { norm_grad_columns(pw, biased ? (C*)pb : nullptr, x, g, ri, mean_in, rows, width, group); });
        emulator::launch(order, blocks(width, 256), dim3(256), 0, [&] { norm_grad_finish(sum_w, pw, groups, width); });
        compare(what + " dw", sum_w.numbers(), dw, tolerance, rows);
        if (!biased) return;
        emulator::launch(order, blocks(width, 256), dim3(256), 0, [&] { norm_grad_finish(sum_b, pb, groups, width); });
        compare(what + " db", sum_b.numbers(), db, tolerance, rows);
    });
}

static Test test([] {
    run(19, 264, true, LAYER, 0);
    run(5, 1037, false, false, 3);
    run(9, 13, true, LAYER, 0);
    run(1, 8, true, false, 0);
});
}  // namespace CASE
#undef CASE
#undef T
#undef LAYER
#undef ROW_THREADS
#undef VECTOR
