//! The text that all kernels of products have: the names of their parameters, the frame, and the stores of sums.

use super::MatmulKernel;
use crate::access::{Params, offset, unravel};

/// The names of a product's launch parameters, and the texts that are made of them.
pub(super) struct ProductText<'k> {
    kernel: &'k MatmulKernel<'k>,
    pub(super) m: String,
    pub(super) n: String,
    pub(super) k: String,
    tiles: [String; 2],
    count: String,
    batch: Vec<String>,
    /// Statements that declare where the operands start, for the coordinates of a batch.
    starts: String,
    /// The strides of each operand along its rows and columns.
    pub(super) steps: Vec<[String; 2]>,
}

impl<'k> ProductText<'k> {
    pub(super) fn new(kernel: &'k MatmulKernel<'k>) -> Self {
        let mut params = Params::new();
        let [m, n, k, tiles_m, tiles_n, count] = std::array::from_fn(|_| params.next());
        let batch = params.many(kernel.batch);
        let (mut starts, mut steps) = (String::new(), Vec::new());
        for i in 0..kernel.sites.len() {
            let name = place(i);
            starts += &format!("let {name} = {};\n", offset(&params.next(), "c", &params.many(kernel.batch)));
            steps.push(std::array::from_fn(|_| params.next()));
        }
        ProductText { kernel, m, n, k, tiles: [tiles_m, tiles_n], count, batch, starts, steps }
    }

    /// A kernel of so many invocations, each with a part of the tile whose first row and column are `first_m` and
    /// `first_n`. `shared` declares workgroup memory, and `builtin` is a further parameter of `main`.
    pub(super) fn frame(&self, shared: &str, threads: usize, builtin: &str, body: &str) -> String {
        let ProductText { tiles: [tiles_m, tiles_n], count, starts, .. } = self;
        let [tile_m, tile_n] = self.kernel.tile();
        format!(
            "{shared}@compute @workgroup_size({threads})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
             @builtin({builtin}) local: u32) {{\n\
             wg_zero = P[0].x;\n\
             let task = group.y * groups.x + group.x;\nlet one = {tiles_m} * {tiles_n};\n\
             if (task >= one * {count}) {{ return; }}\n\
             let which = task / one;\nlet tile = task % one;\n{}{starts}\
             let first_m = (tile / {tiles_n}) * {tile_m}u;\nlet first_n = (tile % {tiles_n}) * {tile_n}u;\n{body}}}\n",
            unravel("c", "which", &self.batch),
        )
    }

    /// Statements that add the other operands to a sum and store it, if its row and column are inside the output.
    pub(super) fn store(&self, row: &str, column: &str, sum: &str) -> String {
        let MatmulKernel { sites, how, .. } = *self.kernel;
        let at = |i: usize| {
            let [along_rows, along_columns] = &self.steps[i];
            format!("{} + row * {along_rows} + column * {along_columns}", place(i))
        };
        let add = |i: usize| format!("{{ let at = {};\nvalue += {}; }}\n", at(i), sites[i].load("at"));
        let added: String = (3..sites.len()).map(add).collect();
        let value = sites[0].form.accumulate(how, &sites[0].load("at"), "value");
        format!(
            "{{ let row = first_m + {row}; let column = first_n + {column};\nif (row < {} && column < {}) {{\n\
             var value = {sum};\n{added}let at = {};\n{}}} }}\n",
            self.m,
            self.n,
            at(0),
            sites[0].store("at", &value)
        )
    }
}

/// The name of the offset at which operand `i` starts.
fn place(i: usize) -> String {
    match i {
        0 => "to".into(),
        1 => "from_a".into(),
        2 => "from_b".into(),
        _ => format!("from_{i}"),
    }
}

/// The text of each number below `n`.
pub(super) fn each(n: usize, f: impl Fn(usize) -> String) -> String {
    (0..n).map(f).collect()
}
