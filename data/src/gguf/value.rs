//! Values of metadata.

/// A value of metadata. Narrow integers are read as `U32` or `I64`, and lists of integers as `I32s`.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// An unsigned integer of at most 32 bits.
    U32(u32),
    /// An unsigned integer of 64 bits.
    U64(u64),
    /// A signed integer of at most 64 bits.
    I64(i64),
    /// A floating-point number of 32 bits.
    F32(f32),
    /// A floating-point number of 64 bits.
    F64(f64),
    /// A boolean, one byte.
    Bool(bool),
    /// A string.
    Text(String),
    /// Signed integers of 32 bits.
    I32s(Vec<i32>),
    /// Floating-point numbers of 32 bits.
    F32s(Vec<f32>),
    /// Strings.
    Texts(Vec<String>),
}

impl GgufValue {
    /// The value as an unsigned integer.
    pub fn count(&self) -> Option<u64> {
        match *self {
            GgufValue::U32(x) => Some(x.into()),
            GgufValue::U64(x) => Some(x),
            GgufValue::I64(x) => x.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a floating-point number. An `F32` gives the shortest decimal that rounds to it: 1e-5, not
    /// 9.999999747e-6.
    pub fn number(&self) -> Option<f64> {
        match *self {
            GgufValue::F32(x) => x.to_string().parse().ok(),
            GgufValue::F64(x) => Some(x),
            _ => None,
        }
    }

    /// The value as a boolean.
    pub fn flag(&self) -> Option<bool> {
        if let GgufValue::Bool(x) = *self { Some(x) } else { None }
    }

    /// The value as a string.
    pub fn text(&self) -> Option<&str> {
        if let GgufValue::Text(x) = self { Some(x) } else { None }
    }

    /// The value as strings.
    pub fn texts(&self) -> Option<&[String]> {
        if let GgufValue::Texts(x) = self { Some(x) } else { None }
    }

    /// The number of the value's type in files.
    fn id(&self) -> u32 {
        match self {
            GgufValue::U32(_) => 4,
            GgufValue::F32(_) => 6,
            GgufValue::Bool(_) => 7,
            GgufValue::Text(_) => 8,
            GgufValue::I32s(_) | GgufValue::F32s(_) | GgufValue::Texts(_) => 9,
            GgufValue::U64(_) => 10,
            GgufValue::I64(_) => 11,
            GgufValue::F64(_) => 12,
        }
    }

    /// Appends the number of the type and the value. A list has the type and number of its elements before them.
    pub fn put(&self, to: &mut Vec<u8>) {
        to.extend(self.id().to_le_bytes());
        match self {
            GgufValue::U32(x) => to.extend(x.to_le_bytes()),
            GgufValue::U64(x) => to.extend(x.to_le_bytes()),
            GgufValue::I64(x) => to.extend(x.to_le_bytes()),
            GgufValue::F32(x) => to.extend(x.to_le_bytes()),
            GgufValue::F64(x) => to.extend(x.to_le_bytes()),
            GgufValue::Bool(x) => to.push(u8::from(*x)),
            GgufValue::Text(x) => put_text(to, x),
            GgufValue::I32s(list) => {
                put_list(to, 5, list.len());
                list.iter().for_each(|x| to.extend(x.to_le_bytes()));
            }
            GgufValue::F32s(list) => {
                put_list(to, 6, list.len());
                list.iter().for_each(|x| to.extend(x.to_le_bytes()));
            }
            GgufValue::Texts(list) => {
                put_list(to, 8, list.len());
                list.iter().for_each(|x| put_text(to, x));
            }
        }
    }
}

/// Appends a string: its length in bytes, and its UTF-8.
pub fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn put_list(to: &mut Vec<u8>, id: u32, len: usize) {
    to.extend(id.to_le_bytes());
    to.extend((len as u64).to_le_bytes());
}
