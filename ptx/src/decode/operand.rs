//! Operands of instructions.

use std::fmt;

use crate::{
    error::PtxError,
    registers::Class,
    text::{Cursor, integer},
};

/// A number in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Literal {
    Integer(i128),
    /// The bits of an `f32`.
    Single(u32),
    /// The bits of an `f64`.
    Double(u64),
}

impl Literal {
    /// The bits of the number in a register of a class.
    pub(super) fn bits(self, class: Class) -> Option<u64> {
        match (self, class) {
            (Literal::Integer(value), Class::Word) => Some(u64::from(value as u32)),
            (Literal::Integer(value), Class::Long) => Some(value as u64),
            (Literal::Integer(value), Class::Mask) => Some(u64::from(value != 0)),
            (Literal::Single(bits), Class::Word) => Some(bits.into()),
            (Literal::Double(bits), Class::Long) => Some(bits),
            _ => None,
        }
    }
}

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Operand<'a> {
    Name(&'a str),
    Literal(Literal),
    /// `[base+offset]`.
    Address(Box<Operand<'a>>, i64),
    /// `{a, b}`.
    Vector(Vec<Operand<'a>>),
    /// `a|b`.
    Pair(&'a str, &'a str),
}

impl fmt::Display for Operand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Name(name) => write!(f, "`{name}`"),
            Operand::Literal(literal) => write!(f, "{literal:?}"),
            Operand::Address(base, offset) => write!(f, "[{base}{offset:+}]"),
            Operand::Vector(all) => write!(f, "a vector of {}", all.len()),
            Operand::Pair(a, b) => write!(f, "`{a}|{b}`"),
        }
    }
}

/// Parses the operands of a statement.
pub(super) fn operands<'a>(cursor: &mut Cursor<'a, '_>) -> Result<Vec<Operand<'a>>, PtxError> {
    let mut all = Vec::new();
    while !cursor.is_at_end() {
        all.push(operand(cursor)?);
        if !cursor.take(",") && !cursor.is_at_end() {
            return Err(cursor.error(format!("`,` expected, found `{}`", cursor.peek())));
        }
    }
    Ok(all)
}

fn operand<'a>(cursor: &mut Cursor<'a, '_>) -> Result<Operand<'a>, PtxError> {
    if cursor.take("{") {
        let mut all = Vec::new();
        while !cursor.take("}") {
            all.push(operand(cursor)?);
            cursor.take(",");
        }
        return Ok(Operand::Vector(all));
    }
    if cursor.take("[") {
        let base = operand(cursor)?;
        let mut offset = 0;
        while cursor.peek() == "+" || cursor.peek() == "-" {
            cursor.take("+");
            offset += match read_literal(cursor)? {
                Literal::Integer(value) => value as i64,
                _ => return Err(cursor.error("an offset that is no integer")),
            };
        }
        cursor.expect("]")?;
        return Ok(Operand::Address(Box::new(base), offset));
    }
    let first = cursor.peek();
    if first == "-" || first.starts_with(|c: char| c.is_ascii_digit()) {
        return read_literal(cursor).map(Operand::Literal);
    }
    let name = cursor.next()?;
    if cursor.take("|") { Ok(Operand::Pair(name, cursor.next()?)) } else { Ok(Operand::Name(name)) }
}

fn read_literal(cursor: &mut Cursor<'_, '_>) -> Result<Literal, PtxError> {
    let negative = cursor.take("-");
    let text = cursor.next()?;
    let hexadecimal = |prefixes: [&str; 2], digits: usize| {
        let rest = prefixes.iter().find_map(|prefix| text.strip_prefix(prefix))?;
        (rest.len() == digits).then(|| u64::from_str_radix(rest, 16).ok()).flatten()
    };
    if let Some(bits) = hexadecimal(["0f", "0F"], 8) {
        return Ok(Literal::Single(bits as u32));
    }
    if let Some(bits) = hexadecimal(["0d", "0D"], 16) {
        return Ok(Literal::Double(bits));
    }
    let value = integer(text).ok_or_else(|| cursor.error(format!("a number expected, found `{text}`")))?;
    Ok(Literal::Integer(if negative { -i128::from(value) } else { value.into() }))
}

/// The bits of a number in the text, for an initial value.
pub(crate) fn literal(cursor: &mut Cursor<'_, '_>) -> Result<u64, PtxError> {
    Ok(match read_literal(cursor)? {
        Literal::Integer(value) => value as u64,
        Literal::Single(bits) => bits.into(),
        Literal::Double(bits) => bits,
    })
}
