// conv.cu against the formulas.
#include "check.h"

#define CASE of_f32
#define T float
#include "conv_case.h"

#define CASE of_bf16
#define T bf16
#include "conv_case.h"

#define CASE of_f64
#define T double
#include "conv_case.h"

int main() { return run_all("conv"); }
