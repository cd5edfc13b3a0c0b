//! The number of memory allocations of an op: counted, so that it cannot grow unnoticed.
#![allow(missing_docs)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use autograd::{Var, no_grad};
use numcore::{DType, Tensor, ops::PointwiseOps};
use runtime_cpu::Cpu;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every call to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: as the trait says.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as the trait says.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of one call, once everything is warm.
fn of(mut call: impl FnMut()) -> usize {
    (0..10).for_each(|_| call());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (0..100).for_each(|_| call());
    (ALLOCATIONS.load(Ordering::Relaxed) - before).div_ceil(100)
}

#[test]
fn an_op_allocates_its_value_and_its_node() {
    let cpu = Cpu::with_threads(1);
    let leaf = |seed| Var::leaf("x", Tensor::normal(&cpu, [4], DType::F32, 0.0, 1.0, seed).unwrap()).unwrap();
    let (a, b) = (leaf(1), leaf(2));
    let untracked = of(|| no_grad(|| drop(a.add(&b).unwrap())));
    let tracked = of(|| drop(a.add(&b).unwrap()));
    println!("host allocations: {untracked} for an untracked op, {tracked} for a tracked one");
    assert!(untracked <= 1, "an untracked op allocates {untracked} times: its buffer's handle should be all");
    assert!(tracked <= 2, "a tracked op allocates {tracked} times: its buffer's handle and its node should be all");
}
