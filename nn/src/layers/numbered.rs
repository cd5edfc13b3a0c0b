//! Lists of parts that keep their numbers in a longer list.

use std::ops::{Deref, DerefMut};

use numcore::Runtime;

use crate::{Module, Visitor};

/// Consecutive parts of a list, named by their numbers in the full list: "3", "4", ….
#[derive(Debug)]
pub struct Numbered<M> {
    first: usize,
    parts: Vec<M>,
}

impl<M> Numbered<M> {
    /// Creates a list of parts that are numbered from `first` on.
    pub fn new(first: usize, parts: Vec<M>) -> Self {
        Numbered { first, parts }
    }

    /// The parts in order, each with its number.
    pub fn numbered(&self) -> impl Iterator<Item = (usize, &M)> {
        (self.first..).zip(&self.parts)
    }

    /// Splits the list into consecutive lists. Each cut is the index of the first part of the next list; cuts do not
    /// descend.
    pub fn split(self, cuts: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let (count, mut parts, mut start) = (self.parts.len(), self.parts.into_iter(), 0);
        let list = |end: usize| {
            let list = Numbered { first: self.first + start, parts: parts.by_ref().take(end - start).collect() };
            start = end;
            list
        };
        cuts.into_iter().chain([count]).map(list).collect()
    }
}

impl<M> Deref for Numbered<M> {
    type Target = Vec<M>;

    fn deref(&self) -> &Vec<M> {
        &self.parts
    }
}

impl<M> DerefMut for Numbered<M> {
    fn deref_mut(&mut self) -> &mut Vec<M> {
        &mut self.parts
    }
}

impl<M> IntoIterator for Numbered<M> {
    type Item = M;
    type IntoIter = std::vec::IntoIter<M>;

    fn into_iter(self) -> Self::IntoIter {
        self.parts.into_iter()
    }
}

impl<R: Runtime, M: Module<R>> Module<R> for Numbered<M> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        self.numbered().for_each(|(number, part)| part.visit(&number.to_string(), visitor));
        visitor.leave();
    }
}
