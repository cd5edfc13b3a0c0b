// One variant of cross_entropy.cu.
namespace CASE {
#include "../cross_entropy.cu"

// Of rows of `pad` more elements than classes, which nothing reads or writes.
static void run(i64 rows, i64 classes, bool weighted, i64 pad = 0) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(rows) + "x" + std::to_string(classes) +
                       (weighted ? " weighted" : "");
    typedef Compute<T>::type C;
    const i64 pitch = classes + pad;
    const double smoothing = SMOOTH ? 0.1 : 0, inf = std::numeric_limits<double>::infinity();
    const i64 ignored = -100;
    Memory<T> x = Memory<T>::normal(rows * pitch, 3), w = Memory<T>::normal(classes);
    Memory<C> g = Memory<C>::normal(rows);
    for (i64 r = 0; r < rows; r++)
        for (i64 c = classes; c < pitch; c++) x[r * pitch + c] = element<T>(NAN);
    for (i64 c = 0; c < classes; c++) w[c] = element<T>(std::abs(number(w[c])));
    Memory<i64> target(rows);
    for (i64 r = 0; r < rows; r++) target[r] = r % 5 == 3 ? ignored : rng.below(classes);
    if (!SMOOTH && rows > 2 && classes > 1) x[2 * pitch + (target[2] + 1) % classes] = element<T>(-inf);
    if (rows > 7) x[7 * pitch] = element<T>(NAN);
    auto xs = x.numbers(), gs = g.numbers(), ws = w.numbers();
    if (!weighted) std::fill(ws.begin(), ws.end(), 1.0);
    double joint = std::accumulate(ws.begin(), ws.end(), 0.0);
    std::vector<double> loss(rows), tops(rows), log_sums(rows), d(rows * pitch);
    for (i64 r = 0; r < rows; r++) {
        const double* row = &xs[r * pitch];
        double top = -inf, sum = 0, total = 0;
        for (i64 c = 0; c < classes; c++) top = larger(top, row[c]);
        for (i64 c = 0; c < classes; c++) sum += std::exp(row[c] - top), total += ws[c] * row[c];
        tops[r] = top, log_sums[r] = std::log(sum);
        double lse = top + log_sums[r];
        i64 own = target[r];
        if (own == ignored) continue;
        loss[r] = ws[own] * (lse - row[own]) * (1 - smoothing);
        if (SMOOTH) loss[r] += smoothing / classes * (lse * joint - total);
        for (i64 c = 0; c < classes; c++) {
            double p = std::exp(row[c] - lse);
            d[r * pitch + c] = gs[r] * (ws[own] * (1 - smoothing) * (p - (c == own)) + smoothing / classes * (joint * p - ws[c]));
        }
    }
    Memory<T> dx(rows * pitch);
    Memory<C> loss_out(rows), tops_out(rows), log_sums_out(rows), tops_in(tops), log_sums_in(log_sums);
    Memory<u32> flag(1);
    const T* wp = weighted ? (T*)w : nullptr;
    dim3 block = ROW_THREADS == 32 ? dim3(32, 4) : dim3(ROW_THREADS), grid = ROW_THREADS == 32 ? blocks(rows, 4) : dim3(rows);
    for (i64 i = 0; i < rows * pitch; i++) dx[i] = element<T>(0);
    double fine = unit_of<C>() * 20 * std::sqrt(classes), tolerance = unit_of<T>() + fine;
    in_orders([&](int order) {
        flag[0] = 0;
        emulator::launch(order, grid, block, 0,
                         [&] { cross_entropy(loss_out, tops_out, log_sums_out, x, target, wp, pitch, rows, classes, ignored, smoothing, flag); });
        compare(what + " loss", loss_out.numbers(), loss, fine + unit_of<C>());
        compare(what + " top", tops_out.numbers(), tops, 0);
        compare(what + " log_sum", log_sums_out.numbers(), log_sums, fine);
        emulator::launch(order, grid, block, 0,
                         [&] { cross_entropy_grad(dx, x, target, tops_in, log_sums_in, g, wp, pitch, pitch, rows, classes, ignored, smoothing, flag); });
        compare(what + " dx", dx.numbers(), d, tolerance, 0.1);
        compare(what + " flag", flag.numbers(), {0}, 0);
    });
    // A class out of range: the flag, and an untouched row.
    target[rows - 1] = classes;
    memset(dx, 0x11, rows * pitch * sizeof(T));
    emulator::launch(0, grid, block, 0,
                     [&] { cross_entropy_grad(dx, x, target, tops_in, log_sums_in, g, wp, pitch, pitch, rows, classes, ignored, smoothing, flag); });
    std::vector<double> bytes, same;
    for (u8* p = (u8*)&dx[(rows - 1) * pitch]; p < (u8*)&dx[rows * pitch]; p++) bytes.push_back(*p), same.push_back(0x11);
    compare(what + " untouched", bytes, same, 0);
    compare(what + " flagged", flag.numbers(), {FLAG_CROSS_ENTROPY}, 0);
}

static Test test([] {
    run(11, 37, false);
    run(9, 280, true);
    run(6, 2203, true);
    run(2, 8, true);
    run(7, 1, false);
    run(6, 2203, true, 5);
    run(9, 37, false, 3);
});
}  // namespace CASE
#undef CASE
#undef T
#undef SMOOTH
#undef ROW_THREADS
#undef VECTOR
