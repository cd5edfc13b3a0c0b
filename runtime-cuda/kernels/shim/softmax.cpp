// softmax.cu against the formulas.
#include "check.h"

#define CASE f32_log0_row_threads32_vector0
#define T float
#define LOG 0
#define ROW_THREADS 32
#define VECTOR 0
#include "softmax_case.h"

#define CASE f32_log1_row_threads256_vector1
#define T float
#define LOG 1
#define ROW_THREADS 256
#define VECTOR 1
#include "softmax_case.h"

#define CASE f16_log1_row_threads32_vector1
#define T f16
#define LOG 1
#define ROW_THREADS 32
#define VECTOR 1
#include "softmax_case.h"

#define CASE bf16_log0_row_threads256_vector1
#define T bf16
#define LOG 0
#define ROW_THREADS 256
#define VECTOR 1
#include "softmax_case.h"

#define CASE bf16_log1_row_threads32_vector0
#define T bf16
#define LOG 1
#define ROW_THREADS 32
#define VECTOR 0
#include "softmax_case.h"

#define CASE f64_log1_row_threads256_vector0
#define T double
#define LOG 1
#define ROW_THREADS 256
#define VECTOR 0
#include "softmax_case.h"

int main() { return run_all("softmax"); }
