// norm.cu against the formulas.
#include "check.h"

#define CASE f32_layer0_row_threads32_vector0
#define T float
#define LAYER 0
#define ROW_THREADS 32
#define VECTOR 0
#define PACKS 0
#include "norm_case.h"

#define CASE f32_layer1_row_threads256_vector1
#define T float
#define LAYER 1
#define ROW_THREADS 256
#define VECTOR 1
#define PACKS 0
#include "norm_case.h"

#define CASE f16_layer1_row_threads32_vector1
#define T f16
#define LAYER 1
#define ROW_THREADS 32
#define VECTOR 1
#define PACKS 0
#include "norm_case.h"

#define CASE bf16_layer0_row_threads256_vector1
#define T bf16
#define LAYER 0
#define ROW_THREADS 256
#define VECTOR 1
#define PACKS 0
#include "norm_case.h"

#define CASE bf16_layer1_row_threads32_vector0
#define T bf16
#define LAYER 1
#define ROW_THREADS 32
#define VECTOR 0
#define PACKS 0
#include "norm_case.h"

#define CASE f64_layer1_row_threads256_vector0
#define T double
#define LAYER 1
#define ROW_THREADS 256
#define VECTOR 0
#define PACKS 0
#include "norm_case.h"

#define CASE f32_layer1_row_threads32_vector1_packs3
#define T float
#define LAYER 1
#define ROW_THREADS 32
#define VECTOR 1
#define PACKS 3
#include "norm_case.h"

#define CASE bf16_layer1_row_threads32_vector1_packs2
#define T bf16
#define LAYER 1
#define ROW_THREADS 32
#define VECTOR 1
#define PACKS 2
#include "norm_case.h"

#define CASE f16_layer0_row_threads32_vector1_packs1
#define T f16
#define LAYER 0
#define ROW_THREADS 32
#define VECTOR 1
#define PACKS 1
#include "norm_case.h"

#define CASE bf16_layer1_row_threads256_vector1_packs1
#define T bf16
#define LAYER 1
#define ROW_THREADS 256
#define VECTOR 1
#define PACKS 1
#include "norm_case.h"

#define CASE f32_layer0_row_threads256_vector1_packs2
#define T float
#define LAYER 0
#define ROW_THREADS 256
#define VECTOR 1
#define PACKS 2
#include "norm_case.h"

int main() { return run_all("norm"); }
