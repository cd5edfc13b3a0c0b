// cross_entropy.cu against the formulas.
#include "check.h"

#define CASE f32_smooth0_row_threads32_vector0
#define T float
#define SMOOTH 0
#define ROW_THREADS 32
#define VECTOR 0
#include "cross_entropy_case.h"

#define CASE f32_smooth1_row_threads256_vector1
#define T float
#define SMOOTH 1
#define ROW_THREADS 256
#define VECTOR 1
#include "cross_entropy_case.h"

#define CASE f16_smooth1_row_threads32_vector1
#define T f16
#define SMOOTH 1
#define ROW_THREADS 32
#define VECTOR 1
#include "cross_entropy_case.h"

#define CASE bf16_smooth0_row_threads256_vector1
#define T bf16
#define SMOOTH 0
#define ROW_THREADS 256
#define VECTOR 1
#include "cross_entropy_case.h"

#define CASE bf16_smooth1_row_threads32_vector0
#define T bf16
#define SMOOTH 1
#define ROW_THREADS 32
#define VECTOR 0
#include "cross_entropy_case.h"

#define CASE f64_smooth1_row_threads256_vector0
#define T double
#define SMOOTH 1
#define ROW_THREADS 256
#define VECTOR 0
#include "cross_entropy_case.h"

int main() { return run_all("cross_entropy"); }
