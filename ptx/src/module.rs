//! Modules: the declarations of a text, and its kernels.

use std::{collections::HashMap, sync::Arc};

use crate::{
    declarations::{Declarations, DeviceFunction},
    decode,
    error::PtxError,
    kernel::{Parameter, PtxKernel},
    text::{Cursor, Token, tokens},
    variable::Variable,
};

/// The kernels of a PTX text.
#[derive(Debug)]
pub struct PtxModule {
    kernels: HashMap<String, Arc<PtxKernel>>,
}

/// The head and body of a kernel, before its code is decoded.
struct Entry<'a, 't> {
    name: &'a str,
    parameters: Vec<(&'a str, Variable)>,
    most_threads: Option<u32>,
    body: &'t [Token<'a>],
}

impl PtxModule {
    /// Decodes a module.
    ///
    /// # Errors
    /// The text is not PTX, or has an opcode, a modifier, a register or a directive that this interpreter does not know:
    /// the error names it and its line.
    pub fn parse(text: &str) -> Result<PtxModule, PtxError> {
        let tokens = tokens(text)?;
        let mut cursor = Cursor::new(&tokens);
        let (mut known, mut entries, mut bytes) = (Declarations::default(), Vec::new(), Vec::new());
        while !cursor.is_at_end() {
            match cursor.peek() {
                ".version" | ".target" | ".address_size" | ".file" => drop(cursor.rest_of_line()),
                ".visible" | ".weak" | ".extern" => drop(cursor.next()),
                ".section" => {
                    cursor.next()?;
                    cursor.next()?;
                    cursor.braces()?;
                }
                ".entry" => entries.push(entry(&mut cursor)?),
                ".func" => function(&mut cursor, &mut known)?,
                ".global" | ".const" => variable(&mut cursor, &mut known, &mut bytes)?,
                ".shared" => shared(&mut cursor, &mut known)?,
                other => return Err(cursor.error(format!("unknown directive `{other}`"))),
            }
        }
        let variables: Arc<[u8]> = bytes.into();
        let kernels = entries.iter().map(|entry| {
            let (mut parameters, mut end) = (Vec::new(), 0);
            for (_, variable) in &entry.parameters {
                let offset = variable.place_after(&mut end);
                parameters.push(Parameter { offset, bytes: variable.bytes });
            }
            let named = entry.parameters.iter().zip(&parameters).map(|((name, _), at)| (*name, at.offset));
            let code = decode::decode(&known, named.collect(), entry.body)?;
            let (name, variables) = (entry.name.to_string(), variables.clone());
            let kernel = PtxKernel { name, parameters, most_threads: entry.most_threads, code, variables };
            Ok((entry.name.to_string(), Arc::new(kernel)))
        });
        Ok(PtxModule { kernels: kernels.collect::<Result<_, _>>()? })
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<Arc<PtxKernel>> {
        self.kernels.get(name).cloned()
    }

    /// All kernels, in order of their names.
    pub fn kernels(&self) -> Vec<Arc<PtxKernel>> {
        let mut all: Vec<_> = self.kernels.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

/// `.entry name(parameters) directives { body }`.
fn entry<'a, 't>(cursor: &mut Cursor<'a, 't>) -> Result<Entry<'a, 't>, PtxError> {
    cursor.expect(".entry")?;
    let name = cursor.next()?;
    let parameters = parameters(cursor)?;
    let mut most_threads = None;
    loop {
        match cursor.peek() {
            ".maxntid" | ".reqntid" => {
                cursor.next()?;
                let mut threads = cursor.number()?;
                while cursor.take(",") {
                    threads *= cursor.number()?;
                }
                most_threads = Some(threads as u32);
            }
            ".minnctapersm" | ".maxnreg" => {
                cursor.next()?;
                cursor.number()?;
            }
            _ => break,
        }
    }
    Ok(Entry { name, parameters, most_threads, body: cursor.braces()? })
}

/// `.func (results) name(parameters) { body }`, or its declaration ahead.
fn function<'a, 't>(cursor: &mut Cursor<'a, 't>, known: &mut Declarations<'a, 't>) -> Result<(), PtxError> {
    cursor.expect(".func")?;
    let results = if cursor.peek() == "(" { parameters(cursor)? } else { Vec::new() };
    let name = cursor.next()?;
    let parameters = parameters(cursor)?;
    cursor.take(".noinline");
    if cursor.take(";") {
        return Ok(());
    }
    let names = |all: Vec<(&'a str, Variable)>| all.into_iter().map(|(name, _)| name).collect();
    let function = DeviceFunction { results: names(results), parameters: names(parameters), body: cursor.braces()? };
    known.functions.insert(name, function);
    Ok(())
}

/// `(.param .u64 a, .param .align 8 .b8 b[24])`.
fn parameters<'a>(cursor: &mut Cursor<'a, '_>) -> Result<Vec<(&'a str, Variable)>, PtxError> {
    let mut all = Vec::new();
    if !cursor.take("(") {
        return Ok(all);
    }
    while !cursor.take(")") {
        cursor.expect(".param")?;
        all.push(Variable::parse(cursor)?);
        cursor.take(",");
    }
    Ok(all)
}

/// `.global .align 4 .b32 name[2] = {1, 2};`, whose bytes are appended to those of the module.
fn variable<'a>(
    cursor: &mut Cursor<'a, '_>,
    known: &mut Declarations<'a, '_>,
    bytes: &mut Vec<u8>,
) -> Result<(), PtxError> {
    cursor.next()?;
    let (name, variable) = Variable::parse(cursor)?;
    let mut end = bytes.len();
    let offset = variable.place_after(&mut end);
    bytes.resize(end, 0);
    if cursor.take("=") {
        let (braced, mut at) = (cursor.take("{"), offset);
        loop {
            let value = decode::literal(cursor)?;
            let to = bytes.get_mut(at..at + variable.element).ok_or_else(|| cursor.error("too many values"))?;
            to.copy_from_slice(&value.to_le_bytes()[..variable.element]);
            at += variable.element;
            if !cursor.take(",") {
                break;
            }
        }
        if braced {
            cursor.expect("}")?;
        }
    }
    known.variables.insert(name, offset);
    cursor.expect(";")
}

/// `.shared .align 4 .b8 name[128];`; without a size, the array whose size a launch states.
fn shared<'a>(cursor: &mut Cursor<'a, '_>, known: &mut Declarations<'a, '_>) -> Result<(), PtxError> {
    cursor.next()?;
    let (name, variable) = Variable::parse(cursor)?;
    if variable.bytes == 0 {
        known.dynamic = Some((name, variable.align));
    } else {
        known.shared.insert(name, variable);
    }
    cursor.expect(";")
}
