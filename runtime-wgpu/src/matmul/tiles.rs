//! Kernels in which a workgroup reads the operands of its tile through workgroup memory.

use super::{
    MatmulKernel, SIDE,
    text::{ProductText, each},
};

/// The number of terms of the sums that are in workgroup memory at a time.
const DEPTH: usize = 16;

/// The source of a kernel, whose invocations each keep a block of sums.
pub(super) fn source(kernel: &MatmulKernel<'_>) -> String {
    let text = ProductText::new(kernel);
    let ProductText { m, n, k, .. } = &text;
    let [left, right] = kernel.block.map(TileEdge);
    let read_a = read(kernel, &text, "a", left, kernel.along[0], ["first_m", m, k]);
    let read_b = read(kernel, &text, "b", right, !kernel.along[1], ["first_n", n, k]);
    let sums = |f: &dyn Fn(usize, usize) -> String| each(left.0, |i| each(right.loads(), |j| f(i, j)));
    let declare = sums(&|i, j| format!("var sum{i}_{j} = {}();\n", right.ty()));
    let rows = each(left.loads(), |i| format!("let x{i} = a[t * {}u + y + {}u];\n", left.width(), i * SIDE));
    let columns = each(right.loads(), |j| format!("let y{j} = b[t * {}u + x + {}u];\n", right.width(), j * SIDE));
    let terms = sums(&|i, j| format!("sum{i}_{j} += {} * y{j};\n", left.part("x", i)));
    let store = each(left.0, |i| {
        each(right.0, |j| text.store(&left.place("y", i), &right.place("x", j), &right.part(&format!("sum{i}_"), j)))
    });
    let shared = |name: &str, edge: TileEdge| {
        format!("var<workgroup> {name}: array<{}, {}>;\n", edge.ty(), edge.width() * DEPTH)
    };
    let body = format!(
        "let x = local % {SIDE}u;\nlet y = local / {SIDE}u;\n{declare}\
         for (var depth = 0u; depth < {k}; depth += {DEPTH}u) {{\n{read_a}{read_b}workgroupBarrier();\n\
         for (var t = 0u; t < {DEPTH}u; t++) {{\n{rows}{columns}{terms}}}\nworkgroupBarrier();\n}}\n{store}",
    );
    text.frame(&(shared("a", left) + &shared("b", right)), SIDE * SIDE, "local_invocation_index", &body)
}

/// Fills the tile of an operand, whose first axis is the terms of the sums, with zeros beyond the operand's edge.
/// `inner` is true if the terms are the operand's inner axis.
fn read(
    kernel: &MatmulKernel<'_>,
    text: &ProductText<'_>,
    name: &str,
    edge: TileEdge,
    inner: bool,
    [first, most, depth]: [&str; 3],
) -> String {
    let tile = edge.tile();
    // Adjacent invocations read adjacent elements.
    let (term, lane) = if inner {
        (format!("e % {DEPTH}u"), format!("e / {DEPTH}u"))
    } else {
        (format!("e / {tile}u"), format!("e % {tile}u"))
    };
    let (operand, [of_lane, of_term]) = match (name, &text.steps) {
        ("a", steps) => (1, [&steps[1][0], &steps[1][1]]),
        (_, steps) => (2, [&steps[2][1], &steps[2][0]]),
    };
    format!(
        "for (var e = local; e < {}u; e += {}u) {{\nlet term = {term};\nlet lane = {lane};\nvar value = 0f;\n\
         if ({first} + lane < {most} && depth + term < {depth}) {{\n\
         let at = from_{name} + ({first} + lane) * {of_lane} + (depth + term) * {of_term};\nvalue = {};\n}}\n{}}}\n",
        tile * DEPTH,
        SIDE * SIDE,
        kernel.sites[operand].load("at"),
        edge.set(name),
    )
}

/// A side of the blocks: the number of rows or columns of an invocation, in vectors of four if there are four or
/// more. The vectors of adjacent invocations are adjacent.
#[derive(Clone, Copy)]
struct TileEdge(usize);

impl TileEdge {
    fn fours(self) -> bool {
        self.0 >= 4
    }

    /// The number of rows or columns of a workgroup's tile.
    fn tile(self) -> usize {
        self.0 * SIDE
    }

    fn ty(self) -> &'static str {
        if self.fours() { "vec4<f32>" } else { "f32" }
    }

    /// The length of one term in the array in workgroup memory, in elements. It exceeds the tile by one, so that terms
    /// do not fall into one bank.
    fn width(self) -> usize {
        1 + if self.fours() { self.tile() / 4 } else { self.tile() }
    }

    /// The number of elements or vectors that an invocation reads for one term.
    fn loads(self) -> usize {
        if self.fours() { self.0 / 4 } else { self.0 }
    }

    /// The element `i` of the vectors `name0`, `name1` …
    fn part(self, name: &str, i: usize) -> String {
        if self.fours() { format!("{name}{}.{}", i / 4, ["x", "y", "z", "w"][i % 4]) } else { format!("{name}{i}") }
    }

    /// The position in the tile of element `i` of an invocation.
    fn place(self, lane: &str, i: usize) -> String {
        if self.fours() {
            format!("4u * {lane} + {}u", i / 4 * SIDE * 4 + i % 4)
        } else {
            format!("{lane} + {}u", i * SIDE)
        }
    }

    /// Sets the element of `lane` and `term` in workgroup memory.
    fn set(self, name: &str) -> String {
        let width = self.width();
        if self.fours() {
            format!("{name}[term * {width}u + (lane >> 2u)][lane & 3u] = value;\n")
        } else {
            format!("{name}[term * {width}u + lane] = value;\n")
        }
    }
}
