//! Declarations of variables and the types in them.

use crate::{error::PtxError, registers::Class, text::Cursor};

/// The size and alignment of a declared variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variable {
    pub align: usize,
    /// The bytes of an element.
    pub element: usize,
    /// The bytes of all elements; 0 for an array without a size.
    pub bytes: usize,
}

impl Variable {
    /// Parses `.align 4 .b8 name[128]`, without the space before it.
    pub(crate) fn parse<'a>(cursor: &mut Cursor<'a, '_>) -> Result<(&'a str, Variable), PtxError> {
        let mut align = None;
        if cursor.take(".align") {
            align = Some(cursor.number()? as usize);
        }
        let kind = cursor.next()?;
        let element =
            kind.strip_prefix('.').and_then(size_of).ok_or_else(|| cursor.error(format!("no type `{kind}`")))?;
        let name = cursor.next()?;
        let mut count = 1;
        while cursor.take("[") {
            count *= if cursor.peek() == "]" { 0 } else { cursor.number()? as usize };
            cursor.expect("]")?;
        }
        Ok((name, Variable { align: align.unwrap_or(element).max(1), element, bytes: element * count }))
    }

    /// The variable's offset behind `end` bytes, to which its bytes are added.
    pub(crate) fn place_after(&self, end: &mut usize) -> usize {
        let at = end.next_multiple_of(self.align);
        *end = at + self.bytes;
        at
    }
}

/// The bytes of a value of a type, `f32` say.
pub(crate) fn size_of(kind: &str) -> Option<usize> {
    Some(match kind {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}

/// The class of registers of a type, `.pred` say.
pub(crate) fn register_class(cursor: &mut Cursor<'_, '_>) -> Result<Class, PtxError> {
    let kind = cursor.next()?;
    match kind.strip_prefix('.') {
        Some("pred") => Ok(Class::Mask),
        Some(kind) if size_of(kind) == Some(8) => Ok(Class::Long),
        Some(kind) if size_of(kind).is_some() => Ok(Class::Word),
        _ => Err(cursor.error(format!("no type of registers `{kind}`"))),
    }
}
