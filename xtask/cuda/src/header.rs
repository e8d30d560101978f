//! Reads the declarations of C headers, with bindgen: typedefs, structures, unions, enumerations and functions, with the
//! layout that the C compiler gives them.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use quote::ToTokens;

/// A type in C, by what it is in Rust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// A type of Rust's or of its C library: `c_int`, `usize`.
    Own(String),
    /// The name of a declaration.
    Named(String),
    /// The pointee, and whether it is const.
    Pointer(Box<Type>, bool),
    /// The element type and the length.
    Array(Box<Type>, u64),
    /// The return type, if there is one, and the parameters.
    Function(Option<Box<Type>>, Vec<Field>),
}

impl Type {
    /// Whether it is C's `void`, behind a pointer.
    pub fn is_void(&self) -> bool {
        *self == Self::Own("c_void".to_owned())
    }
}

/// A member of a structure, or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Empty if C omits it.
    pub name: String,
    pub of: Type,
}

/// The members of a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// None, or none that is visible.
    Opaque,
    Structure(Vec<Field>),
    Union(Vec<Field>),
    /// Names and numbers, in order.
    Values(Vec<(String, i64)>),
}

/// A type with its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    pub body: Body,
    /// Whether it specifies an alignment of its own.
    pub aligned: bool,
}

/// A function declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub symbol: String,
    /// A [`Type::Function`].
    pub of: Type,
    pub parameters: Vec<Field>,
}

/// All declarations of a header.
#[derive(Debug, Default)]
pub struct Header {
    /// Typedefs by name.
    pub typedefs: BTreeMap<String, Type>,
    /// Structures, unions and enumerations by name.
    pub definitions: BTreeMap<String, Definition>,
    /// Functions in the order of the header.
    pub functions: Vec<Function>,
    /// By `size NAME`, `align NAME` and `offset NAME FIELD`.
    layout: HashMap<String, u64>,
}

/// Reads the headers that a C file includes, and what it declares itself.
///
/// # Errors
/// There is no libclang, or it rejects the text.
pub fn read(text: &str, folders: &[PathBuf]) -> Result<Header> {
    let folders = folders
        .iter()
        .map(|folder| format!("-I{}", folder.display()));
    let bindings = bindgen::builder()
        .header_contents("all.h", text)
        .clang_args(folders)
        // Functions that a header defines are entry points, too.
        .clang_args(["-w", "-Dstatic=", "-Dinline="])
        .allowlist_function("(cu|__cuda).*")
        .allowlist_type("PFN_.*")
        .default_enum_style(bindgen::EnumVariation::NewType {
            is_bitfield: false,
            is_global: false,
        })
        .generate_comments(false)
        .formatter(bindgen::Formatter::None)
        .generate()
        .context("cannot read the headers: is libclang installed (Debian's libclang1 and libclang-common-15-dev)?")?;
    let mut text = bindings.to_string();
    for (name, nested) in nested(&syn::parse_file(&text)?)? {
        text = text.replace(&name, &nested);
    }
    Header::of(&text)
}

/// The types that C declares within others, by the names that bindgen gives them, and their own.
fn nested(file: &syn::File) -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for item in &file.items {
        let (outer, members) = match item {
            syn::Item::Struct(one) => match &one.fields {
                syn::Fields::Named(members) => (&one.ident, members),
                _ => continue,
            },
            syn::Item::Union(one) => (&one.ident, &one.fields),
            _ => continue,
        };
        for field in fields(members)? {
            if let Type::Named(name) = field.of
                && let Some(own) = name.strip_prefix(&format!("{outer}_"))
                && own.starts_with("CU")
            {
                all.push((name.clone(), own.to_owned()));
            }
        }
    }
    Ok(all)
}

impl Header {
    /// Reads what bindgen has written.
    fn of(text: &str) -> Result<Self> {
        let file = syn::parse_file(text).context("bindgen wrote no Rust")?;
        let mut header = Header::default();
        // The values of an enumeration may precede it.
        let (values, others): (Vec<_>, Vec<_>) =
            (file.items.iter()).partition(|item| matches!(item, syn::Item::Impl(_)));
        for item in others.into_iter().chain(values) {
            header.item(item)?;
        }
        Ok(header)
    }

    /// The size, and the alignment.
    pub fn size(&self, name: &str) -> Option<(u64, u64)> {
        let get = |what: &str| self.layout.get(&format!("{what} {name}")).copied();
        Some((get("size")?, get("align")?))
    }

    pub fn offset(&self, name: &str, field: &str) -> Option<u64> {
        self.layout.get(&format!("offset {name} {field}")).copied()
    }

    fn item(&mut self, item: &syn::Item) -> Result<()> {
        match item {
            syn::Item::Type(one) => {
                let of = of(&one.ty).with_context(|| one.ident.to_string())?;
                self.typedefs.insert(one.ident.to_string(), of);
            }
            // What a typedef of an enumeration becomes.
            syn::Item::Use(one) => {
                if let syn::UseTree::Path(path) = &one.tree
                    && let syn::UseTree::Rename(renamed) = &*path.tree
                {
                    let of = Type::Named(renamed.ident.to_string());
                    self.typedefs.insert(renamed.rename.to_string(), of);
                }
            }
            syn::Item::Struct(one) => {
                let body = match &one.fields {
                    syn::Fields::Named(all) => match fields(all)? {
                        all if all.is_empty() => Body::Opaque,
                        all => Body::Structure(all),
                    },
                    _ => Body::Values(Vec::new()),
                };
                self.define(&one.ident, &one.attrs, body);
            }
            syn::Item::Union(one) => {
                let body = Body::Union(fields(&one.fields)?);
                self.define(&one.ident, &one.attrs, body);
            }
            syn::Item::Impl(one) => self.values(one)?,
            syn::Item::ForeignMod(all) => {
                for item in &all.items {
                    if let syn::ForeignItem::Fn(one) = item {
                        let symbol = one.sig.ident.to_string();
                        let parameters = one.sig.inputs.iter().map(|input| match input {
                            syn::FnArg::Typed(one) => (named(&one.pat), &*one.ty),
                            syn::FnArg::Receiver(_) => unreachable!("C has no methods"),
                        });
                        let parameters = arguments(parameters).with_context(|| symbol.clone())?;
                        let returns = returned(&one.sig.output)?;
                        let of = Type::Function(returns, parameters.clone());
                        self.functions.push(Function {
                            symbol,
                            of,
                            parameters,
                        });
                    }
                }
            }
            // bindgen's tests of layouts.
            syn::Item::Const(one) => {
                if let syn::Expr::Block(block) = &*one.expr {
                    block.block.stmts.iter().for_each(|one| self.check(one));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn define(&mut self, name: &syn::Ident, attributes: &[syn::Attribute], body: Body) {
        let aligned = attributes.iter().any(|one| {
            one.path().is_ident("repr") && one.to_token_stream().to_string().contains("align")
        });
        let definition = Definition { body, aligned };
        self.definitions.insert(plain(name), definition);
    }

    /// The values of an enumeration: `impl E { pub const A: E = E(1); }`.
    fn values(&mut self, one: &syn::ItemImpl) -> Result<()> {
        let Type::Named(name) = of(&one.self_ty)? else {
            return Ok(());
        };
        let Some(Definition {
            body: Body::Values(values),
            ..
        }) = self.definitions.get_mut(&name)
        else {
            return Ok(());
        };
        for item in &one.items {
            if let syn::ImplItem::Const(one) = item
                && let syn::Expr::Call(call) = &one.expr
                && let Some(number) = call.args.first()
            {
                let number = number.to_token_stream().to_string().replace(' ', "");
                let number = number.parse().with_context(|| number.clone())?;
                values.push((one.ident.to_string(), number));
            }
        }
        Ok(())
    }

    /// `["Size of X"][size_of::<X>() - 8usize]` and the like.
    fn check(&mut self, statement: &syn::Stmt) {
        let syn::Stmt::Expr(syn::Expr::Index(outer), _) = statement else {
            return;
        };
        let (what, number) = (outer.expr.to_token_stream(), outer.index.to_token_stream());
        let (what, number) = (what.to_string(), number.to_string());
        let number = number.rsplit("- ").next().unwrap_or_default();
        let Ok(number) = number.trim_end_matches("usize").parse() else {
            return;
        };
        let what = what.trim_matches(['[', ']', '"', ' ']);
        let key = if let Some(name) = what.strip_prefix("Size of ") {
            format!("size {}", renamed(name))
        } else if let Some(name) = what.strip_prefix("Alignment of ") {
            format!("align {}", renamed(name))
        } else if let Some(field) = what.strip_prefix("Offset of field: ")
            && let Some((name, field)) = field.split_once("::")
        {
            format!("offset {} {}", renamed(name), original(field))
        } else {
            return;
        };
        self.layout.insert(key, number);
    }
}

fn fields(all: &syn::FieldsNamed) -> Result<Vec<Field>> {
    let mut found = Vec::new();
    for field in &all.named {
        let name = field.ident.as_ref().map(plain).unwrap_or_default();
        if name == "_unused" || name == "_address" || name.starts_with("__bindgen_padding") {
            continue;
        }
        let of = of(&field.ty).with_context(|| name.clone())?;
        let name = match name.starts_with("__bindgen_anon") {
            true => String::new(),
            false => original(&name).to_owned(),
        };
        found.push(Field { name, of });
    }
    Ok(found)
}

fn arguments<'a>(all: impl Iterator<Item = (String, &'a syn::Type)>) -> Result<Vec<Field>> {
    all.enumerate()
        .map(|(at, (name, ty))| {
            let name = match original(&name) {
                "" => format!("argument{at}"),
                unnamed if unnamed == format!("arg{}", at + 1) => format!("argument{at}"),
                name => name.to_owned(),
            };
            let of = of(ty).with_context(|| name.clone())?;
            Ok(Field { name, of })
        })
        .collect()
}

fn returned(output: &syn::ReturnType) -> Result<Option<Box<Type>>> {
    Ok(match output {
        syn::ReturnType::Default => None,
        syn::ReturnType::Type(_, ty) => Some(Box::new(of(ty)?)),
    })
}

fn of(ty: &syn::Type) -> Result<Type> {
    Ok(match ty {
        syn::Type::Ptr(pointer) => {
            Type::Pointer(Box::new(of(&pointer.elem)?), pointer.const_token.is_some())
        }
        syn::Type::Array(array) => {
            let length = array.len.to_token_stream().to_string();
            let length = length.trim_end_matches("usize").parse();
            Type::Array(Box::new(of(&array.elem)?), length.context("a length")?)
        }
        syn::Type::BareFn(function) => {
            let parameters = function.inputs.iter().map(|input| {
                let name = input.name.as_ref();
                (
                    name.map(|(name, _)| plain(name)).unwrap_or_default(),
                    &input.ty,
                )
            });
            Type::Function(returned(&function.output)?, arguments(parameters)?)
        }
        syn::Type::Path(path) => {
            let Some(last) = path.path.segments.last() else {
                bail!("a type without a name");
            };
            if let syn::PathArguments::AngleBracketed(inner) = &last.arguments {
                // An Option of a function.
                return match inner.args.first() {
                    Some(syn::GenericArgument::Type(inner)) => {
                        Ok(Type::Pointer(Box::new(of(inner)?), false))
                    }
                    _ => bail!("{}", ty.to_token_stream()),
                };
            }
            let name = plain(&last.ident);
            let primitive = path.path.segments.len() > 1
                || matches!(
                    name.as_str(),
                    "u8" | "u16"
                        | "u32"
                        | "u64"
                        | "i8"
                        | "i16"
                        | "i32"
                        | "i64"
                        | "f32"
                        | "f64"
                        | "usize"
                        | "isize"
                );
            match primitive {
                true => Type::Own(name),
                false => Type::Named(name),
            }
        }
        other => bail!("{} has no equal in C", other.to_token_stream()),
    })
}

fn named(pattern: &syn::Pat) -> String {
    pattern.to_token_stream().to_string()
}

fn plain(name: &syn::Ident) -> String {
    renamed(&name.to_string())
}

/// The name of what C leaves unnamed.
fn renamed(name: &str) -> String {
    name.replace("__bindgen_ty_", "_unnamed")
}

/// bindgen appends an underscore to words of Rust.
fn original(name: &str) -> &str {
    match name.strip_suffix('_') {
        Some(word) if syn::parse_str::<syn::Ident>(word).is_err() => word,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(name: &str) -> Type {
        Type::Own(name.to_owned())
    }

    fn pointer(of: Type, constant: bool) -> Type {
        Type::Pointer(Box::new(of), constant)
    }

    #[test]
    fn a_function_with_pointers_of_all_kinds_is_read() {
        let header = Header::of(
            "unsafe extern \"C\" { pub fn f(
                type_: *mut *const ::std::os::raw::c_char,
                v: *const *mut ::std::os::raw::c_void,
                back: ::std::option::Option<unsafe extern \"C\" fn(arg1: u64) -> R>,
            ) -> R; }",
        );
        let f = &header.expect("it is Rust").functions[0];
        assert_eq!(f.symbol, "f");
        let parameters: Vec<_> = f.parameters.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(parameters, ["type", "v", "back"]);
        let char = pointer(pointer(own("c_char"), true), false);
        assert_eq!(f.parameters[0].of, char);
        assert_eq!(
            f.parameters[1].of,
            pointer(pointer(own("c_void"), false), true)
        );
        let returned = Some(Box::new(Type::Named("R".to_owned())));
        let unnamed = Field {
            name: "argument0".to_owned(),
            of: own("u64"),
        };
        let back = Type::Function(returned.clone(), vec![unnamed]);
        assert_eq!(f.parameters[2].of, pointer(back, false));
        assert!(matches!(&f.of, Type::Function(of, _) if *of == returned));
    }

    #[test]
    fn a_typedef_names_a_structure_without_a_tag() {
        let header = Header::of(
            "#[repr(C)] #[repr(align(8))] pub struct T { pub a: u32, pub __bindgen_anon_1: T__bindgen_ty_1 }
             #[repr(C)] pub union T__bindgen_ty_1 { pub c: [u64; 2usize] }
             const _: () = { [\"Size of T\"][::std::mem::size_of::<T>() - 24usize];
                [\"Alignment of T\"][::std::mem::align_of::<T>() - 8usize];
                [\"Offset of field: T::a\"][::std::mem::offset_of!(T, a) - 0usize]; };
             pub type U = T;",
        );
        let header = header.expect("it is Rust");
        let definition = &header.definitions["T"];
        assert!(definition.aligned);
        let Body::Structure(fields) = &definition.body else {
            panic!("it has fields");
        };
        assert_eq!(
            (fields[0].name.as_str(), fields[1].name.as_str()),
            ("a", "")
        );
        assert_eq!(fields[1].of, Type::Named("T_unnamed1".to_owned()));
        let Body::Union(fields) = &header.definitions["T_unnamed1"].body else {
            panic!("it is a union");
        };
        assert_eq!(fields[0].of, Type::Array(Box::new(own("u64")), 2));
        assert_eq!(
            (header.size("T"), header.offset("T", "a")),
            (Some((24, 8)), Some(0))
        );
        assert_eq!(header.typedefs["U"], Type::Named("T".to_owned()));
    }

    #[test]
    fn enumerations_keep_their_names_and_numbers() {
        let header = Header::of(
            "impl E { pub const A: E = E(4); pub const B: E = E(-1); } pub struct E(pub ::std::os::raw::c_int);
             pub use self::E as F;",
        );
        let header = header.expect("it is Rust");
        let values = vec![("A".to_owned(), 4), ("B".to_owned(), -1)];
        assert_eq!(header.definitions["E"].body, Body::Values(values));
        assert_eq!(header.typedefs["F"], Type::Named("E".to_owned()));
    }
}
