// Two-dimensional convolution apart from its GEMM: windows as columns (im2col), and their adjoint. Groups divide the channels
// alone, so they do not matter here.
// Defines: T.
#include "window.cuh"

typedef typename Compute<T>::type Value;

// Columns hold (n, channel, r, s, p, q) at n * batch_step + ((channel * R + r) * S + s) * row_step + p * Q + q: with row_step = P Q
// and batch_step = C R S P Q one matrix per image, with batch_step = P Q and row_step = N P Q one for all (the weights' gradient as
// a single GEMM). `x` has any strides, given as [N, C, H, W].
KERNEL void unfold(T* columns, const T* x, CONSTANT Strided x_at, CONSTANT Conv c, i64 batch_step, i64 row_step) {
    i64 pixels = (i64)c.out_height * c.out_width, rows = (i64)c.channels * c.kernel_height * c.kernel_width;
    i64 count = c.batch * rows * pixels;
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / pixels;
        int pixel = (int)(i - line * pixels), p = pixel / c.out_width, q = pixel - p * c.out_width;
        i64 n = line / rows;
        int row = (int)(line - n * rows), s = row % c.kernel_width, rest = row / c.kernel_width;
        int r = rest % c.kernel_height, channel = rest / c.kernel_height;
        int h = c.row_in(p, r), w = c.column_in(q, s);
        bool inside = h >= 0 && h < c.height && w >= 0 && w < c.width;
        i64 from = n * x_at.stride[0] + channel * x_at.stride[1] + h * x_at.stride[2] + w * x_at.stride[3];
        columns[n * batch_step + row * row_step + pixel] = inside ? x[from] : Store<T>::of(Value(0));
    }
}

// The adjoint: every input element sums the column entries it was copied to, in the order of (r, s). `x` is contiguous.
KERNEL void fold(T* x, const T* columns, CONSTANT Conv c, i64 batch_step, i64 row_step) {
    i64 count = (i64)c.batch * c.channels * c.height * c.width;
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 line = i / c.width, plane = line / c.height, n = plane / c.channels;
        int w = (int)(i - line * c.width), h = (int)(line - plane * c.height), channel = (int)(plane - n * c.channels);
        Value sum = Value(0);
        for (int r = 0; r < c.kernel_height; r++) {
            int p = c.row_out(h, r);
            if (p < 0) continue;
            for (int s = 0; s < c.kernel_width; s++) {
                int q = c.column_out(w, s);
                if (q < 0) continue;
                i64 row = ((i64)channel * c.kernel_height + r) * c.kernel_width + s;
                sum += load(columns[n * batch_step + row * row_step + (i64)p * c.out_width + q]);
            }
        }
        x[i] = Store<T>::of(sum);
    }
}
