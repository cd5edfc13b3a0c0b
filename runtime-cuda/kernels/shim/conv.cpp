// conv.cu and depthwise.cu against plain loops.
#include "check.h"

#include "../window.cuh"

// Fills in the output's sizes.
static void sized(Conv& c) {
    c.out_height = (c.height + 2 * c.padding_height - c.dilation_height * (c.kernel_height - 1) - 1) / c.stride_height + 1;
    c.out_width = (c.width + 2 * c.padding_width - c.dilation_width * (c.kernel_width - 1) - 1) / c.stride_width + 1;
}

#define CASE conv_f32
#define T float
#include "conv_case.h"

#define CASE conv_bf16
#define T bf16
#include "conv_case.h"

#define CASE conv_f64
#define T double
#include "conv_case.h"

#define CASE depthwise_f32
#define T float
#include "depthwise_case.h"

#define CASE depthwise_bf16
#define T bf16
#include "depthwise_case.h"

#define CASE depthwise_f64
#define T double
#include "depthwise_case.h"

int main() { return run_all("conv"); }
