// softmax.cu against the formulas.
#include "check.h"

#define CASE f32_warp
#define T float
#define LOG 0
#define ROW_THREADS 32
#define VECTOR 0
#include "softmax_case.h"

#define CASE f32_log_block_vector
#define T float
#define LOG 1
#define ROW_THREADS 256
#define VECTOR 1
#include "softmax_case.h"

#define CASE bf16_block_vector
#define T bf16
#define LOG 0
#define ROW_THREADS 256
#define VECTOR 1
#include "softmax_case.h"

#define CASE bf16_log_warp
#define T bf16
#define LOG 1
#define ROW_THREADS 32
#define VECTOR 0
#include "softmax_case.h"

#define CASE f16_warp_vector
#define T f16
#define LOG 0
#define ROW_THREADS 32
#define VECTOR 1
#include "softmax_case.h"

#define CASE f64_log_block
#define T double
#define LOG 1
#define ROW_THREADS 256
#define VECTOR 0
#include "softmax_case.h"

int main() { return run_all("softmax"); }
