//! The bodies of kernels: declarations of registers and memory, labels and instructions.

mod matrices;
mod memory;
mod opcodes;
mod operand;
mod scope;
mod tiles;

use std::collections::HashMap;

use crate::{
    declarations::{Declarations, VARIABLES},
    error::{PtxError, Space},
    instruction::{Code, Guard, Instruction, Lines, Special, TileProduct, WarpAction},
    registers::{Class, RegisterRows, RegisterSlot},
    text::{Cursor, Token},
    variable::{Variable, register_class},
};

pub(crate) use operand::literal;
use operand::{Operand, operands};
use scope::{NameScope, Symbol};

/// Decodes the body of a kernel whose parameters have these offsets.
pub(crate) fn decode(
    known: &Declarations<'_, '_>,
    parameters: Vec<(&str, usize)>,
    body: &[Token<'_>],
) -> Result<Code, PtxError> {
    let mut decoder = KernelDecoder::new(known);
    let names = parameters.into_iter().map(|(name, at)| (name, Symbol::Memory(Space::Parameters, at as u64)));
    decoder.body(NameScope::new(names), body)?;
    decoder.guard = decoder.always;
    decoder.push(WarpAction::Exit);
    Ok(decoder.finish())
}

/// The state of decoding one kernel.
struct KernelDecoder<'a, 't, 'k> {
    known: &'k Declarations<'a, 't>,
    rows: RegisterRows,
    constants: HashMap<(u8, u64), RegisterSlot>,
    specials: HashMap<Special, RegisterSlot>,
    /// The address of the array whose size a launch states, once it is used.
    dynamic: HashMap<u8, RegisterSlot>,
    instructions: Vec<Instruction>,
    tile_products: Vec<TileProduct>,
    lines: Vec<Lines>,
    line: Lines,
    guard: Guard,
    always: Guard,
    /// The row of the carry, once an instruction uses it.
    carry: Option<RegisterSlot>,
    shared: usize,
    shared_places: HashMap<&'a str, u64>,
    local: usize,
    shared_unit: usize,
    global_unit: usize,
    /// The functions under way, from the outermost call on.
    calls: Vec<&'a str>,
}

/// A body under way: its names, its labels, and the branches to them.
struct OpenBody<'a> {
    scope: NameScope<'a>,
    labels: HashMap<&'a str, u32>,
    branches: Vec<(usize, &'a str, u32)>,
}

impl<'a, 't, 'k> KernelDecoder<'a, 't, 'k> {
    fn new(known: &'k Declarations<'a, 't>) -> KernelDecoder<'a, 't, 'k> {
        let mut rows = RegisterRows::default();
        let always = Guard { row: rows.take(Class::Mask, 1).row, flip: 0 };
        let constants = HashMap::from([((Class::Mask as u8, 1), RegisterSlot { class: Class::Mask, row: always.row })]);
        KernelDecoder {
            known,
            rows,
            constants,
            specials: HashMap::new(),
            dynamic: HashMap::new(),
            instructions: Vec::new(),
            tile_products: Vec::new(),
            lines: Vec::new(),
            line: Lines { ptx: 0, source: None },
            guard: always,
            always,
            carry: None,
            shared: 0,
            shared_places: HashMap::new(),
            local: 0,
            shared_unit: 16,
            global_unit: 16,
            calls: Vec::new(),
        }
    }

    fn finish(self) -> Code {
        let align = self.known.dynamic.map_or(1, |(_, align)| align);
        let shared = self.shared.next_multiple_of(align);
        let mut constants: Vec<_> = self.constants.into_iter().map(|((_, bits), slot)| (slot, bits)).collect();
        constants.extend(self.dynamic.values().map(|slot| (*slot, shared as u64)));
        Code {
            waits: self.instructions.iter().any(|i| matches!(i.action, WarpAction::Barrier)),
            instructions: self.instructions,
            tile_products: self.tile_products,
            lines: self.lines,
            rows: self.rows,
            constants,
            specials: self.specials.into_iter().map(|(special, slot)| (slot, special)).collect(),
            shared,
            local: self.local.next_multiple_of(16),
            shared_unit: self.shared_unit,
            global_unit: self.global_unit,
        }
    }

    fn push(&mut self, action: WarpAction) {
        self.instructions.push(Instruction { guard: self.guard, action });
        self.lines.push(self.line);
    }

    fn error(&self, message: impl Into<String>) -> PtxError {
        PtxError::new(self.line.ptx, message)
    }

    /// Decodes the tokens of a body.
    fn body(&mut self, scope: NameScope<'a>, tokens: &[Token<'a>]) -> Result<(), PtxError> {
        let mut body = OpenBody { scope, labels: HashMap::new(), branches: Vec::new() };
        let mut cursor = Cursor::new(tokens);
        while !cursor.is_at_end() {
            self.line.ptx = cursor.line();
            match cursor.peek() {
                "{" => {
                    cursor.next()?;
                    body.scope.open();
                }
                "}" => {
                    cursor.next()?;
                    body.scope.close();
                }
                ".loc" => {
                    let line = cursor.rest_of_line();
                    self.line.source = line.get(2).and_then(|token| token.text.parse().ok());
                }
                ".pragma" => drop(cursor.statement()?),
                word if word.starts_with('.') => self.declaration(&mut cursor, &mut body.scope)?,
                label if cursor.second() == ":" => {
                    cursor.next()?;
                    cursor.next()?;
                    body.labels.insert(label, self.instructions.len() as u32);
                }
                _ => self.instruction(&mut cursor, &mut body)?,
            }
        }
        let end = self.instructions.len() as u32;
        for (at, label, line) in body.branches {
            let target = if label.is_empty() { Some(&end) } else { body.labels.get(label) };
            let target = target.ok_or_else(|| PtxError::new(line, format!("no label `{label}`")))?;
            self.instructions[at].action = WarpAction::Branch { to: *target };
        }
        Ok(())
    }

    /// `.reg .b32 %r<5>;`, `.shared`, `.local` or `.param` with a variable.
    fn declaration(&mut self, cursor: &mut Cursor<'a, '_>, scope: &mut NameScope<'a>) -> Result<(), PtxError> {
        match cursor.next()? {
            ".reg" => {
                let class = register_class(cursor)?;
                loop {
                    let name = cursor.next()?;
                    if cursor.take("<") {
                        let count = cursor.number()? as u32;
                        cursor.expect(">")?;
                        scope.declare_registers(name, self.rows.take(class, count), count);
                    } else {
                        scope.declare(name, Symbol::Register(self.rows.take(class, 1)));
                    }
                    if !cursor.take(",") {
                        return cursor.expect(";");
                    }
                }
            }
            ".shared" => {
                let (name, variable) = Variable::parse(cursor)?;
                let at = variable.place_after(&mut self.shared);
                scope.declare(name, Symbol::Memory(Space::Shared, at as u64));
            }
            // The parameters of a call are memory of a thread.
            ".local" | ".param" => {
                let (name, variable) = Variable::parse(cursor)?;
                let at = variable.place_after(&mut self.local);
                scope.declare(name, Symbol::Memory(Space::Local, at as u64));
            }
            other => return Err(cursor.error(format!("unknown directive `{other}` in a body"))),
        }
        cursor.expect(";")
    }

    /// `@%p1 opcode operands;`.
    fn instruction(&mut self, cursor: &mut Cursor<'a, '_>, body: &mut OpenBody<'a>) -> Result<(), PtxError> {
        self.guard = self.always;
        if cursor.take("@") {
            let flip = if cursor.take("!") { u32::MAX } else { 0 };
            let slot = self.register(&body.scope, cursor.next()?, Class::Mask)?;
            self.guard = Guard { row: slot, flip };
        }
        let opcode = cursor.next()?;
        let statement = cursor.statement()?;
        if opcode.starts_with("call") {
            return self.call(statement, &body.scope);
        }
        let operands = operands(&mut Cursor::new(statement))?;
        self.opcode(opcode, &operands, body)
    }

    /// `call (result), function, (parameters)`: the function's body in this place.
    fn call(&mut self, statement: &[Token<'a>], scope: &NameScope<'a>) -> Result<(), PtxError> {
        let mut names = statement.iter().map(|token| token.text).filter(|text| !matches!(*text, "(" | ")" | ","));
        let has_results = statement.first().is_some_and(|token| token.text == "(");
        let results: Vec<_> = if has_results { names.by_ref().take(1).collect() } else { Vec::new() };
        let name = names.next().ok_or_else(|| self.error("a call without a function"))?;
        let arguments: Vec<&str> = names.collect();
        let Some(function) = self.known.functions.get(name) else {
            return Err(self.error(format!("a call of `{name}`, which the module does not define")));
        };
        if self.calls.contains(&name) {
            return Err(self.error(format!("a call of `{name}` within itself")));
        }
        let formal = function.results.iter().chain(&function.parameters);
        let actual = results.iter().chain(&arguments);
        if formal.clone().count() != actual.clone().count() {
            return Err(self.error(format!("a call of `{name}` with another number of parameters")));
        }
        let places = formal.zip(actual).map(|(formal, actual)| Ok((*formal, self.symbol(scope, actual)?)));
        let inner = NameScope::new(places.collect::<Result<Vec<_>, PtxError>>()?.into_iter());
        let (guard, line) = (self.guard, self.line);
        if guard.row != self.always.row {
            return Err(self.error("a call under a predicate"));
        }
        self.calls.push(name);
        self.body(inner, function.body)?;
        self.calls.pop();
        self.line = line;
        Ok(())
    }

    /// The meaning of a name in a body.
    fn symbol(&mut self, scope: &NameScope<'a>, name: &str) -> Result<Symbol, PtxError> {
        if let Some(symbol) = scope.find(name) {
            return Ok(symbol);
        }
        if let Some(special) = Special::named(name) {
            let rows = &mut self.rows;
            let slot = *self.specials.entry(special).or_insert_with(|| rows.take(Class::Word, 1));
            return Ok(Symbol::Register(slot));
        }
        if let Some(offset) = self.known.variables.get(name) {
            return Ok(Symbol::Memory(Space::Global, VARIABLES + *offset as u64));
        }
        if let Some((name, variable)) = self.known.shared.get_key_value(name) {
            let shared = &mut self.shared;
            let at = *self.shared_places.entry(name).or_insert_with(|| variable.place_after(shared) as u64);
            return Ok(Symbol::Memory(Space::Shared, at));
        }
        if self.known.dynamic.is_some_and(|(dynamic, _)| dynamic == name) {
            return Ok(Symbol::Dynamic);
        }
        Err(self.error(format!("unknown name `{name}`")))
    }

    /// The row of a register of a class, which an instruction writes.
    fn register(&mut self, scope: &NameScope<'a>, name: &str, class: Class) -> Result<u32, PtxError> {
        match self.symbol(scope, name)? {
            Symbol::Register(slot) if slot.class == class => Ok(slot.row),
            _ => Err(self.error(format!("`{name}` is no register of the size that the instruction needs"))),
        }
    }

    /// A register with this value in all lanes.
    fn constant(&mut self, class: Class, bits: u64) -> RegisterSlot {
        let rows = &mut self.rows;
        *self.constants.entry((class as u8, bits)).or_insert_with(|| rows.take(class, 1))
    }

    /// The register that holds an operand: its own, or one for its value.
    fn source(&mut self, scope: &NameScope<'a>, operand: &Operand<'a>, class: Class) -> Result<RegisterSlot, PtxError> {
        let fits = |slot: &RegisterSlot| slot.class == class;
        let slot = match operand {
            Operand::Name(name) => match self.symbol(scope, name)? {
                Symbol::Register(slot) => Some(slot).filter(fits),
                Symbol::Memory(_, at) => Some(self.constant(class, at)),
                Symbol::Dynamic => {
                    let rows = &mut self.rows;
                    Some(*self.dynamic.entry(class as u8).or_insert_with(|| rows.take(class, 1)))
                }
            },
            Operand::Literal(literal) => literal.bits(class).map(|bits| self.constant(class, bits)),
            _ => None,
        };
        slot.ok_or_else(|| self.error(format!("the operand {operand} has not the size that the instruction needs")))
    }
}
