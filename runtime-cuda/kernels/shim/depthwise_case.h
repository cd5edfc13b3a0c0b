// One variant of depthwise.cu.
namespace CASE {
#include "../depthwise.cu"

static void run(Conv c, int multiplier) {
    std::string what = std::string(__PRETTY_FUNCTION__);
    sized(c);
    i64 outs = c.channels * multiplier, inputs = (i64)c.batch * c.channels * c.height * c.width;
    i64 outputs = (i64)c.batch * outs * c.out_height * c.out_width, weights = outs * c.kernel_height * c.kernel_width;
    Memory<T> x = Memory<T>::normal(inputs), w = Memory<T>::normal(weights), g = Memory<T>::normal(outputs);
    Memory<T> y(outputs), dx(inputs), dw(weights);
    std::vector<double> want(outputs), want_x(inputs), want_w(weights), xs = x.numbers(), ws = w.numbers(), gs = g.numbers();
    for (int n = 0; n < c.batch; n++)
        for (int o = 0; o < outs; o++)
            for (int p = 0; p < c.out_height; p++)
                for (int q = 0; q < c.out_width; q++)
                    for (int r = 0; r < c.kernel_height; r++)
                        for (int s = 0; s < c.kernel_width; s++) {
                            int h = p * c.stride_height + r * c.dilation_height - c.padding_height;
                            int v = q * c.stride_width + s * c.dilation_width - c.padding_width;
                            if (h < 0 || h >= c.height || v < 0 || v >= c.width) continue;
                            i64 to = ((n * outs + o) * c.out_height + p) * c.out_width + q;
                            i64 from = ((n * c.channels + o / multiplier) * (i64)c.height + h) * c.width + v;
                            i64 by = (o * c.kernel_height + r) * c.kernel_width + s;
                            want[to] += xs[from] * ws[by];
                            want_x[from] += gs[to] * ws[by];
                            want_w[by] += gs[to] * xs[from];
                        }
    // One rounding of every product and addition.
    double terms =
        std::max<double>(2.0 * c.batch * c.out_height * c.out_width, 2.0 * multiplier * c.kernel_height * c.kernel_width);
    double tolerance = unit_of<T>() + terms * unit_of<Compute<T>::type>();
    in_orders([&](int order) {
        emulator::launch(order, blocks(outputs, 2 * 256), dim3(256), 0, [&] { depthwise(y, x, w, c, multiplier); });
        compare(what + " y", y.numbers(), want, tolerance);
        emulator::launch(order, blocks(inputs, 256), dim3(256), 0, [&] { depthwise_input(dx, g, w, c, multiplier); });
        compare(what + " dx", dx.numbers(), want_x, tolerance);
        emulator::launch(order, dim3(weights), dim3(256), 0, [&] { depthwise_weight(dw, x, g, c, multiplier); });
        compare(what + " dw", dw.numbers(), want_w, tolerance);
    });
}

static Test test([] {
    run({2, 3, 7, 9, 3, 3, 0, 0, 1, 1, 1, 1, 1, 1}, 1);
    run({3, 2, 11, 8, 3, 2, 0, 0, 2, 3, 2, 0, 2, 1}, 2);
    run({1, 1, 17, 21, 1, 5, 0, 0, 1, 1, 0, 2, 1, 1}, 1);
});
}  // namespace CASE
#undef CASE
#undef T
