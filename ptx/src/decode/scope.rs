//! The names that are declared in a body, by nested blocks.

use std::collections::HashMap;

use crate::{error::Space, registers::RegisterSlot};

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    Register(RegisterSlot),
    /// A variable: its memory, and its address there.
    Memory(Space, u64),
    /// The shared array whose size a launch states.
    Dynamic,
}

/// Names by blocks, the innermost last.
pub(super) struct NameScope<'a> {
    blocks: Vec<NameBlock<'a>>,
}

#[derive(Default)]
struct NameBlock<'a> {
    names: HashMap<&'a str, Symbol>,
    /// Numbered registers: the first, and their number, by the part of their name before the number.
    numbered: HashMap<&'a str, (RegisterSlot, u32)>,
}

impl<'a> NameScope<'a> {
    pub(super) fn new(names: impl Iterator<Item = (&'a str, Symbol)>) -> NameScope<'a> {
        NameScope { blocks: vec![NameBlock { names: names.collect(), numbered: HashMap::new() }] }
    }

    pub(super) fn open(&mut self) {
        self.blocks.push(NameBlock::default());
    }

    pub(super) fn close(&mut self) {
        self.blocks.pop();
    }

    pub(super) fn declare(&mut self, name: &'a str, symbol: Symbol) {
        self.blocks.last_mut().map(|block| block.names.insert(name, symbol));
    }

    pub(super) fn declare_registers(&mut self, prefix: &'a str, first: RegisterSlot, count: u32) {
        self.blocks.last_mut().map(|block| block.numbered.insert(prefix, (first, count)));
    }

    pub(super) fn find(&self, name: &str) -> Option<Symbol> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u32>().ok();
        self.blocks.iter().rev().find_map(|block| {
            let numbered = || {
                let (first, count) = *block.numbered.get(prefix)?;
                let number = number.filter(|number| *number < count)?;
                Some(Symbol::Register(RegisterSlot { row: first.row + number, ..first }))
            };
            block.names.get(name).copied().or_else(numbered)
        })
    }
}
