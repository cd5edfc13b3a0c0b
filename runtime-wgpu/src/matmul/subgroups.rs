//! Kernels in which a subgroup keeps a tile: an invocation has whole columns, and the rows' elements go from one to all
//! others. There are no barriers and no workgroup memory.

use super::{
    MatmulKernel,
    text::{ProductText, each},
};

/// The source of a kernel whose workgroup is one subgroup of `lanes` invocations.
pub(super) fn source(kernel: &MatmulKernel<'_>, lanes: usize) -> String {
    let text = ProductText::new(kernel);
    let ProductText { m, n, k, steps, .. } = &text;
    let [rows, columns] = kernel.block;
    let sums = |f: &dyn Fn(usize, usize) -> String| each(rows, |i| each(columns, |j| f(i, j)));
    // Beyond an edge, elements of the edge are read, whose sums are not stored.
    let row = |i: usize| format!("let a{i} = from_a + min(first_m + {i}u, {m} - 1u) * {};\n", steps[1][0]);
    let column =
        |j: usize| format!("let b{j} = from_b + min(first_n + {}, {n} - 1u) * {};\n", place(j, lanes), steps[2][1]);
    let left =
        |i: usize| format!("let at{i} = a{i} + of_a;\nlet own{i} = {};\n", kernel.sites[1].load(&format!("at{i}")));
    let right =
        |j: usize| format!("let at{j} = b{j} + of_b;\nlet y{j} = {};\n", kernel.sites[2].load(&format!("at{j}")));
    let body = format!(
        "{}{}{}\
         for (var depth = 0u; depth < {k}; depth += {lanes}u) {{\n\
         let of_a = min(depth + local, {k} - 1u) * {};\n{}\
         let terms = min({lanes}u, {k} - depth);\nfor (var t = 0u; t < terms; t++) {{\n\
         let of_b = (depth + t) * {};\n{}{}{}}}\n}}\n{}",
        each(rows, row),
        each(columns, column),
        sums(&|i, j| format!("var sum{i}_{j} = 0f;\n")),
        steps[1][1],
        each(rows, left),
        steps[2][0],
        each(columns, right),
        each(rows, |i| format!("let x{i} = subgroupShuffle(own{i}, t);\n")),
        sums(&|i, j| format!("sum{i}_{j} += x{i} * y{j};\n")),
        sums(&|i, j| text.store(&format!("{i}u"), &place(j, lanes), &format!("sum{i}_{j}"))),
    );
    text.frame("", lanes, "subgroup_invocation_id", &body)
}

/// The column of the tile that an invocation has as its `j`-th: adjacent invocations have adjacent columns.
fn place(j: usize, lanes: usize) -> String {
    format!("local + {}u", j * lanes)
}
