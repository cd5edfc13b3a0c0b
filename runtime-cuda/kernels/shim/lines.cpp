// arg_reduce.cu, scan.cu, sort.cu and radix.cu against plain loops.
#include "check.h"

#define CASE of_f32
#define T float
#define K u32
#include "lines_case.h"

#define CASE of_f16
#define T f16
#define K u32
#include "lines_case.h"

#define CASE of_f64
#define T double
#define K u64
#include "lines_case.h"

#define CASE of_i64
#define T i64
#define K u64
#include "lines_case.h"

#define CASE of_u8
#define T u8
#define K u32
#include "lines_case.h"

int main() { return run_all("lines"); }
