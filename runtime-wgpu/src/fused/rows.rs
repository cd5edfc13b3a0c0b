//! The frame of kernels in which each workgroup has a row: passes over its columns, and sums and maxima of their
//! values.

use std::fmt::Write;

use numcore::Result;
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header},
    bindings::{Bindings, OperandView},
    pipelines::PipelineKey,
    pointwise::STEPS,
    queue::Dispatch,
};

/// The most invocations of a workgroup: WebGPU's smallest limit.
const GROUP: usize = 256;

/// The indexing of a contiguous operand by rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Along {
    /// An element for each row and column.
    Both,
    /// An element for each row.
    Rows,
    /// An element for each column.
    Columns,
}

/// A launch over rows: its operands, inputs first, then outputs.
pub(super) struct RowKernel<'a, 'p> {
    pub(super) op: &'static str,
    pub(super) kind: &'static str,
    pub(super) operands: &'p [(OperandView<'a>, Along)],
    /// The index of the first operand that is written.
    pub(super) outputs: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) numbers: &'p [u32],
    /// The properties other than operands on which the source depends.
    pub(super) details: &'p [u32],
    /// True if an index is looked up, with the complement of the launch's ticket as the last parameter.
    pub(super) indexed: bool,
}

/// The widest rows that a kernel's loops can process.
pub(super) const WIDEST: usize = GROUP * STEPS / 8;

impl RowKernel<'_, '_> {
    /// Runs the kernel with the statements that `body` writes, which may use `row` and `width`.
    pub(super) fn run(self, wgpu: &Wgpu, body: impl FnOnce(&mut RowFrame<'_>) -> String) -> Result<()> {
        let views: SmallVec<[OperandView<'_>; 8]> = self.operands.iter().map(|(p, _)| *p).collect();
        let (mut bindings, slots) = Bindings::of(&wgpu.queue.device, self.op, &views)?;
        let mut atomic: SmallVec<[bool; 8]> = smallvec![false; bindings.len()];
        for k in self.outputs..views.len() {
            atomic[slots[k]] |= StorageForm::of(views[k].dtype).per_word() > 1;
        }
        let flag = self.indexed.then(|| bindings.add_whole(&wgpu.queue.flag));
        atomic.extend(flag.map(|_| true));
        let site = |k: usize| Site { slot: slots[k], form: StorageForm::of(views[k].dtype), atomic: atomic[slots[k]] };
        let sites: SmallVec<[Site; 8]> = (0..views.len()).map(site).collect();
        let threads = self.width.div_ceil(4).next_power_of_two().clamp(32, GROUP);
        let mut params: SmallVec<[u32; 32]> = smallvec![0, self.rows as u32, self.width as u32];
        params.extend((0..views.len()).map(|k| bindings.base(slots[k], &views[k])));
        params.extend_from_slice(self.numbers);
        let mut details: SmallVec<[u32; 32]> = smallvec![threads as u32, bindings.len() as u32];
        details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | (s.form as u32) << 1 | u32::from(s.atomic)));
        details.extend_from_slice(self.details);
        let key = PipelineKey { kind: self.kind, program: None, details };
        let header = header(&atomic, params.len());
        let launch = Dispatch { op: self.op, key, bindings, params: &params, groups: self.rows, work: 0 };
        let (operands, subgroup) = (self.operands, wgpu.queue.device.subgroup);
        wgpu.queue.launch(launch, || {
            let declared = header + &trees(threads, subgroup);
            Ok(source(&declared, (threads, subgroup > 1), &sites, operands, flag.unwrap_or(0), body))
        })
    }
}

/// The context in which a kernel's body is generated.
pub(super) struct RowFrame<'f> {
    sites: &'f [Site],
    operands: &'f [(OperandView<'f>, Along)],
    bases: Vec<String>,
    threads: usize,
    /// The binding in which an index out of range is reported.
    pub(super) flag: usize,
    pub(super) params: Params,
}

impl RowFrame<'_> {
    /// The element of an operand at this row, or inside [`columns`](RowFrame::columns) at this row and column.
    pub(super) fn load(&self, k: usize) -> String {
        self.sites[k].load(&format!("i{k}"))
    }

    /// The element of an operand at an offset, given as a name.
    pub(super) fn load_at(&self, k: usize, at: &str) -> String {
        self.sites[k].load(at)
    }

    /// The offset of an operand's first element.
    pub(super) fn base(&self, k: usize) -> &str {
        &self.bases[k]
    }

    /// Stores an element at this row or column.
    pub(super) fn store(&self, k: usize, value: &str) -> String {
        self.sites[k].store(&format!("i{k}"), value)
    }

    /// A loop over the columns `c`, in which these operands are indexed.
    pub(super) fn columns(&self, operands: &[usize], body: &str) -> String {
        let mut text = format!("for (var c = local; c < width; c += {}u) {{\n", self.threads);
        for &k in operands {
            let at = if self.operands[k].1 == Along::Both { "row * width + c" } else { "c" };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "let i{k} = {} + {at};", self.bases[k]);
        }
        text + body + "}\n"
    }
}

fn source(
    declared: &str,
    (threads, has_subgroups): (usize, bool),
    sites: &[Site],
    operands: &[(OperandView<'_>, Along)],
    flag: usize,
    body: impl FnOnce(&mut RowFrame<'_>) -> String,
) -> String {
    let mut params = Params::new();
    let (rows, width) = (params.next(), params.next());
    let bases = params.many(sites.len());
    let each_row = operands.iter().enumerate().filter(|(_, (_, along))| *along == Along::Rows);
    let starts: String = each_row.map(|(k, _)| format!("let i{k} = {} + row;\n", bases[k])).collect();
    let body = body(&mut RowFrame { sites, operands, bases, threads, flag, params });
    let (lane, set_lane) = match has_subgroups {
        true => (", @builtin(subgroup_invocation_id) lane: u32", "wg_lane = lane;\n"),
        false => ("", ""),
    };
    format!(
        "{declared}@compute @workgroup_size({threads})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
         @builtin(local_invocation_index) local: u32{lane}) {{\n\
         wg_zero = P[0].x;\n{set_lane}let row = group.y * groups.x + group.x;\nif (row >= {rows}) {{ return; }}\n\
         let width = {width};\n{starts}{body}}}\n",
    )
}

/// The functions `all_sum` and `all_max`, which merge a value of each invocation in a tree and give all the result. The
/// first levels are in workgroup memory. The last, which a subgroup has, are exchanges: the same tree, so the same
/// bits.
fn trees(threads: usize, subgroup: usize) -> String {
    let last = subgroup.min(threads) / 2;
    let halves = std::iter::successors(Some(last), |half| Some(half / 2)).take_while(|&half| half > 0);
    let lane = if last > 0 { "var<private> wg_lane: u32;\n" } else { "" };
    let mut text = format!("{lane}var<workgroup> shared_x: array<f32, {threads}>;\n");
    for (name, merge) in [("all_sum", "a + b"), ("all_max", "wg_max(a, b)")] {
        text += &format!(
            "fn {name}(local: u32, x: f32) -> f32 {{\nworkgroupBarrier();\nshared_x[local] = x;\nworkgroupBarrier();\n\
             for (var half = {}u; half > {last}u; half >>= 1u) {{\n\
             if (local < half) {{\nlet a = shared_x[local];\nlet b = shared_x[local + half];\n\
             shared_x[local] = {merge};\n}}\nworkgroupBarrier();\n}}\n",
            threads / 2
        );
        if last == 0 {
            text += "return shared_x[0];\n}\n";
            continue;
        }
        text += &format!("var a = shared_x[wg_lane % {}u];\n", 2 * last);
        for half in halves.clone() {
            text += &format!("{{\nlet b = subgroupShuffleDown(a, {half}u);\na = {merge};\n}}\n");
        }
        text += "return subgroupBroadcast(a, 0u);\n}\n";
    }
    text
}

/// The bits of a scalar as a launch parameter.
pub(super) fn number(x: f64) -> u32 {
    (x as f32).to_bits()
}

/// The expression that reads a launch parameter as a float.
pub(super) fn read(params: &mut Params) -> String {
    format!("bitcast<f32>({})", params.next())
}
