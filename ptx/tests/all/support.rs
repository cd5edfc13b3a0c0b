//! Memory, and kernels around a body.

use std::{cell::Cell, sync::Arc};

use ptx::{FaultKind, LaunchError, LaunchGrid, LaunchMemory, MemoryRegion, PtxKernel, PtxModule};

/// Pieces of memory at addresses of their own.
#[derive(Default)]
pub struct Memory {
    pieces: Vec<(u64, Vec<Cell<u8>>)>,
}

impl Memory {
    /// Adds words as a piece; returns its address.
    pub fn words(&mut self, words: &[u32]) -> u64 {
        let at = 0x1_0000 * (self.pieces.len() as u64 + 1);
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).map(Cell::new).collect();
        self.pieces.push((at, bytes));
        at
    }

    /// The words of the piece at an address.
    pub fn read(&self, at: u64) -> Vec<u32> {
        let (_, bytes) = self.pieces.iter().find(|(start, _)| *start == at).expect("a piece at this address");
        let word = |bytes: &[Cell<u8>]| u32::from_le_bytes(std::array::from_fn(|i| bytes[i].get()));
        bytes.chunks_exact(4).map(word).collect()
    }
}

impl LaunchMemory for Memory {
    fn region(&self, address: u64) -> Option<MemoryRegion<'_>> {
        let within = |start: u64, length: usize| (start..start + length as u64).contains(&address);
        let (start, bytes) = self.pieces.iter().find(|(start, bytes)| within(*start, bytes.len()))?;
        Some(MemoryRegion { start: *start, bytes })
    }
}

/// Registers that every body has; `%to` and `%from` are two parameters, `%t` is the number of the thread and `%at` its
/// word in `%to`.
const HEAD: &str = "
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %d<16>; .reg .f64 %g<8>;
    .reg .b64 %to, %from, %at; .reg .b32 %t;
    ld.param.u64 %to, [k_0]; ld.param.u64 %from, [k_1];
    mov.u32 %t, %tid.x;
    mul.wide.u32 %at, %t, 4; add.s64 %at, %at, %to;
";

/// A kernel `k` of two pointers with this body.
pub fn kernel(body: &str) -> Arc<PtxKernel> {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 k_0, .param .u64 k_1)\n\
         {{ {HEAD} {body}\nret; }}"
    );
    let module = PtxModule::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    module.kernel("k").expect("the kernel k")
}

pub fn grid(blocks: u32, threads: u32) -> LaunchGrid {
    LaunchGrid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
}

/// Launches a kernel on an output of `words` words, and inputs; returns the output.
pub fn run(kernel: &PtxKernel, grid: LaunchGrid, words: usize, input: &[u32]) -> Result<Vec<u32>, LaunchError> {
    let mut memory = Memory::default();
    let (to, from) = (memory.words(&vec![0; words]), memory.words(input));
    kernel.launch(grid, &[&to.to_le_bytes(), &from.to_le_bytes()], &memory)?;
    Ok(memory.read(to))
}

/// The output of one warp, one word a lane.
pub fn warp(body: &str, input: &[u32]) -> Vec<u32> {
    run(&kernel(body), grid(1, 32), 32, input).unwrap_or_else(|e| panic!("{e}"))
}

/// The finding in a launch of this body.
pub fn fault(body: &str, grid: LaunchGrid) -> FaultKind {
    match run(&kernel(body), grid, 256, &[0; 256]) {
        Err(LaunchError::Fault(fault)) => fault.kind,
        other => panic!("no fault: {other:?}"),
    }
}
