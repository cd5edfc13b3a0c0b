// One variant of softmax.cu.
namespace CASE {
#include "../softmax.cu"

static void run(i64 rows, i64 width, double scale) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(rows) + "x" + std::to_string(width);
    Memory<T> x = Memory<T>::normal(rows * width, scale), g = Memory<T>::normal(rows * width);
    if (rows > 3 && width > 2) {
        double inf = std::numeric_limits<double>::infinity();
        for (i64 i = 0; i < width; i++) x[width + i] = element<T>(-inf);
        x[2 * width + 1] = element<T>(NAN);
        x[3 * width] = element<T>(-inf);
        x[3 * width + 1] = element<T>(0.25);
        // So low that exponentials vanish unless the largest is subtracted.
        for (i64 i = 0; i < width; i++) x[i] = element<T>(number(x[i]) - 2000);
    }
    auto xs = x.numbers(), gs = g.numbers();
    std::vector<double> want(rows * width), back(rows * width);
    for (i64 r = 0; r < rows; r++) {
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        for (i64 i = 0; i < width; i++) top = larger(top, xs[r * width + i]);
        top = finite_or_zero(top);
        for (i64 i = 0; i < width; i++) sum += std::exp(xs[r * width + i] - top);
        for (i64 i = 0; i < width; i++) {
            double v = xs[r * width + i] - top;
            want[r * width + i] = LOG ? v - std::log(sum) : sum == 0 ? 0 : std::exp(v) / sum;
        }
    }
    Memory<T> y(rows * width), d(rows * width), out(want);
    auto outs = out.numbers();
    for (i64 r = 0; r < rows; r++) {
        double sum = 0;
        for (i64 i = r * width; i < (r + 1) * width; i++) sum += LOG ? gs[i] : gs[i] * outs[i];
        for (i64 i = r * width; i < (r + 1) * width; i++) back[i] = LOG ? gs[i] - std::exp(outs[i]) * sum : outs[i] * (gs[i] - sum);
    }
    dim3 block = ROW_THREADS == 32 ? dim3(32, 4) : dim3(ROW_THREADS), grid = ROW_THREADS == 32 ? blocks(rows, 4) : dim3(rows);
    double unit = unit_of<T>() + 3 * unit_of<Compute<T>::type>() * std::sqrt(width);
    in_orders([&](int order) {
        emulator::launch(order, grid, block, 0, [&] { softmax(y, x, rows, width); });
        compare(what, y.numbers(), want, 4 * unit, LOG ? 1 + scale : 0.01);
        emulator::launch(order, grid, block, 0, [&] { softmax_grad(d, out, g, rows, width); });
        compare(what + " grad", d.numbers(), back, 4 * unit, 1);
    });
}

static Test test([] {
    run(5, 37, 1);
    run(4, 1, 1);
    run(9, 3, 1);
    run(4, 40, 1);
    run(6, 1001, 8);
    run(5, 1032, 8);
});
}  // namespace CASE
#undef CASE
#undef T
#undef LOG
#undef ROW_THREADS
#undef VECTOR
