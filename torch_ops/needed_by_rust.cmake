# Writes what the library CORE expects a shim to define, as NM sees it: `${NEEDED}.txt`, options that have the linker refuse to leave one
# undefined, and `${NEEDED}.map`, the version script that exports these and nothing else.

execute_process(COMMAND "${NM}" -D --undefined-only "${CORE}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
# of the C library and its like each has a version, as `memcpy@GLIBC_2.14`; weak ones ("w") may stay undefined
string(REGEX MATCHALL " U [A-Za-z0-9_]+\n" symbols "${symbols}")
if(NOT symbols)
    message(FATAL_ERROR "${CORE} needs no function of a shim: is it the core library?")
endif()

set(required "")
set(exported "")
foreach(symbol IN LISTS symbols)
    string(REGEX REPLACE "^ U |\n$" "" symbol "${symbol}")
    string(APPEND required "-Wl,--require-defined=${symbol}\n")
    string(APPEND exported "    ${symbol};\n")
endforeach()
file(WRITE "${NEEDED}.txt" "${required}")
file(WRITE "${NEEDED}.map" "{\nglobal:\n${exported}local:\n    *;\n};\n")
