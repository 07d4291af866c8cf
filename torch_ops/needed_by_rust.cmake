# What the core library CORE expects a shim to define. Without SHIM writes the version script MAP, which exports these functions and
# nothing else; with SHIM fails, with their names, if that library does not export them all.

function(symbols library which pattern result)
    execute_process(COMMAND "${NM}" -D --${which} "${library}" OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "${pattern}[A-Za-z0-9_]+\n" found "${text}")
    list(TRANSFORM found REPLACE "${pattern}|\n" "")
    set(${result} "${found}" PARENT_SCOPE)
endfunction()

# of the C library and its like each has a version, as `memcpy@GLIBC_2.14`; weak ones ("w") may stay undefined
symbols("${CORE}" undefined-only " U " needed)
if(NOT needed)
    message(FATAL_ERROR "${CORE} needs no function of a shim: is it the core library?")
endif()

if(SHIM)
    symbols("${SHIM}" defined-only " T " exported)
    list(REMOVE_ITEM needed ${exported})
    if(needed)
        file(REMOVE "${SHIM}")
        list(JOIN needed ", " needed)
        message(FATAL_ERROR "Rust calls what torch_ops/ does not define: ${needed}")
    endif()
else()
    list(JOIN needed "; " needed)
    file(WRITE "${MAP}" "{ global: ${needed}; local: *; };\n")
endif()
