//! The registers of a warp: rows of 32 lanes.

/// The number of threads of a warp.
pub(crate) const LANES: usize = 32;

/// The mask of all lanes.
pub(crate) const ALL: u32 = u32::MAX;

/// The storage class of a register. Registers of 16 bits are words too, of which the lower half counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Up to 32 bits.
    Word,
    /// 64 bits.
    Long,
    /// A predicate.
    Mask,
}

/// A register: its class, and its row among those of this class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisterSlot {
    pub class: Class,
    pub row: u32,
}

/// The numbers of rows of each class.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegisterRows {
    pub words: u32,
    pub longs: u32,
    pub masks: u32,
}

impl RegisterRows {
    /// Takes `count` adjacent rows of a class; returns the first.
    pub(crate) fn take(&mut self, class: Class, count: u32) -> RegisterSlot {
        let next = match class {
            Class::Word => &mut self.words,
            Class::Long => &mut self.longs,
            Class::Mask => &mut self.masks,
        };
        let row = *next;
        *next += count;
        RegisterSlot { class, row }
    }
}

/// All registers of a warp.
#[derive(Clone, Debug)]
pub(crate) struct WarpRegisters {
    words: Vec<[u32; LANES]>,
    longs: Vec<[u64; LANES]>,
    masks: Vec<u32>,
}

impl WarpRegisters {
    pub(crate) fn new(rows: RegisterRows) -> WarpRegisters {
        WarpRegisters {
            words: vec![[0; LANES]; rows.words as usize],
            longs: vec![[0; LANES]; rows.longs as usize],
            masks: vec![0; rows.masks as usize],
        }
    }

    /// Writes the bits of one value to all lanes.
    pub(crate) fn fill(&mut self, slot: RegisterSlot, bits: u64) {
        match slot.class {
            Class::Word => self.words[slot.row as usize] = [bits as u32; LANES],
            Class::Long => self.longs[slot.row as usize] = [bits; LANES],
            Class::Mask => self.masks[slot.row as usize] = if bits & 1 == 1 { ALL } else { 0 },
        }
    }

    /// The bits of one lane.
    #[inline(always)]
    pub(crate) fn bits(&self, slot: RegisterSlot, lane: usize) -> u64 {
        match slot.class {
            Class::Word => u64::from(self.words[slot.row as usize][lane]),
            Class::Long => self.longs[slot.row as usize][lane],
            Class::Mask => u64::from(self.masks[slot.row as usize] >> lane & 1),
        }
    }

    /// Writes the bits of one lane.
    #[inline(always)]
    pub(crate) fn set_bits(&mut self, slot: RegisterSlot, lane: usize, bits: u64) {
        match slot.class {
            Class::Word => self.words[slot.row as usize][lane] = bits as u32,
            Class::Long => self.longs[slot.row as usize][lane] = bits,
            Class::Mask => {
                let mask = &mut self.masks[slot.row as usize];
                *mask = *mask & !(1 << lane) | ((bits & 1) as u32) << lane;
            }
        }
    }

    pub(crate) fn mask(&self, row: u32) -> u32 {
        self.masks[row as usize]
    }

    pub(crate) fn set_mask(&mut self, row: u32, active: u32, value: u32) {
        let mask = &mut self.masks[row as usize];
        *mask = *mask & !active | value & active;
    }

    pub(crate) fn word(&self, row: u32) -> &[u32; LANES] {
        &self.words[row as usize]
    }

    pub(crate) fn word_mut(&mut self, row: u32) -> &mut [u32; LANES] {
        &mut self.words[row as usize]
    }

    /// The values of a word or a long as 64 bits, `offset` added.
    #[inline]
    pub(crate) fn addresses(&self, slot: RegisterSlot, offset: i64) -> [u64; LANES] {
        let mut out = [0; LANES];
        match slot.class {
            Class::Long => {
                let row = &self.longs[slot.row as usize];
                (0..LANES).for_each(|i| out[i] = row[i].wrapping_add_signed(offset));
            }
            _ => {
                let row = &self.words[slot.row as usize];
                (0..LANES).for_each(|i| out[i] = u64::from(row[i]).wrapping_add_signed(offset));
            }
        }
        out
    }
}

/// A type of values that lanes hold: how rows store it.
pub(crate) trait LaneValue: Copy {
    const CLASS: Class;
    type Row: Copy;
    const EMPTY: Self::Row;

    fn row(registers: &WarpRegisters, row: u32) -> &Self::Row;
    fn get(row: &Self::Row, lane: usize) -> Self;
    fn set(row: &mut Self::Row, lane: usize, value: Self);
    /// Stores the lanes of `mask`.
    fn store(registers: &mut WarpRegisters, row: u32, mask: u32, values: &Self::Row);
}

/// Values in rows of words or longs: the type, its class, its conversions from and to bits.
macro_rules! lanes {
    ($($type:ty, $class:ident, $field:ident, $bits:ty, |$from:ident| $value:expr, |$to:ident| $stored:expr;)*) => {$(
        impl LaneValue for $type {
            const CLASS: Class = Class::$class;
            type Row = [$bits; LANES];
            const EMPTY: Self::Row = [0; LANES];

            #[inline(always)]
            fn row(registers: &WarpRegisters, row: u32) -> &Self::Row {
                &registers.$field[row as usize]
            }

            #[inline(always)]
            fn get(row: &Self::Row, lane: usize) -> Self {
                let $from = row[lane];
                $value
            }

            #[inline(always)]
            fn set(row: &mut Self::Row, lane: usize, $to: Self) {
                row[lane] = $stored;
            }

            #[inline(always)]
            fn store(registers: &mut WarpRegisters, row: u32, mask: u32, values: &Self::Row) {
                let to = &mut registers.$field[row as usize];
                if mask == ALL {
                    *to = *values;
                } else {
                    (0..LANES).filter(|lane| mask >> lane & 1 == 1).for_each(|lane| to[lane] = values[lane]);
                }
            }
        }
    )*};
}
lanes! {
    u8, Word, words, u32, |bits| bits as u8, |value| u32::from(value);
    i8, Word, words, u32, |bits| bits as i8, |value| value as u32;
    u16, Word, words, u32, |bits| bits as u16, |value| u32::from(value);
    i16, Word, words, u32, |bits| bits as i16, |value| value as u32;
    u32, Word, words, u32, |bits| bits, |value| value;
    i32, Word, words, u32, |bits| bits as i32, |value| value as u32;
    f32, Word, words, u32, |bits| f32::from_bits(bits), |value| value.to_bits();
    u64, Long, longs, u64, |bits| bits, |value| value;
    i64, Long, longs, u64, |bits| bits as i64, |value| value as u64;
    f64, Long, longs, u64, |bits| f64::from_bits(bits), |value| value.to_bits();
}

impl LaneValue for bool {
    const CLASS: Class = Class::Mask;
    type Row = u32;
    const EMPTY: u32 = 0;

    #[inline(always)]
    fn row(registers: &WarpRegisters, row: u32) -> &u32 {
        &registers.masks[row as usize]
    }

    #[inline(always)]
    fn get(row: &u32, lane: usize) -> bool {
        row >> lane & 1 == 1
    }

    #[inline(always)]
    fn set(row: &mut u32, lane: usize, value: bool) {
        *row |= u32::from(value) << lane;
    }

    #[inline(always)]
    fn store(registers: &mut WarpRegisters, row: u32, mask: u32, values: &u32) {
        registers.set_mask(row, mask, *values);
    }
}
