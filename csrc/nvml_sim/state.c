/* Reads the state file.
 *
 *     nvml-sim 1
 *     driver 580.95.05
 *     gpus 8
 *     gpu.3.uuid GPU-…
 *     gpu.3.ecc 2
 *     gpu.3.error.nvmlDeviceGetUUID 15
 *     end
 *
 * The last line tells a whole file from one that was cut off. A key that is not there has its healthy value.
 */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char VARIABLE[] = "NVRX_NVML_SIM_STATE";
static const char DEFAULT_PATH[] = "/run/nvrx-node/nvml";
static const char FIRST[] = "nvml-sim 1\n";
static const char LAST[] = "\nend\n";
enum { MOST_KEY = 96, MOST_DIGITS = 19 };

enum state_result state_read(struct state *state) {
    const char *path = getenv(VARIABLE);
    int file = open(path != NULL ? path : DEFAULT_PATH, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return errno == ENOENT ? STATE_MISSING : STATE_DAMAGED;
    }
    size_t length = 0;
    ssize_t got = 1;
    while (got > 0 && length < STATE_MOST_BYTES) {
        got = read(file, state->text + length, STATE_MOST_BYTES - length);
        if (got > 0) {
            length += (size_t)got;
        }
    }
    close(file);
    state->text[length] = '\0';
    bool whole = got == 0 && strlen(state->text) == length && length >= sizeof FIRST + sizeof LAST - 2 &&
                 strncmp(state->text, FIRST, sizeof FIRST - 1) == 0 &&
                 strcmp(state->text + length - (sizeof LAST - 1), LAST) == 0;
    return whole ? STATE_READ : STATE_DAMAGED;
}

static const char *find(const struct state *state, const char *key) {
    size_t length = strlen(key);
    for (const char *line = state->text; line != NULL && *line != '\0';) {
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            return line + length + 1;
        }
        line = strchr(line, '\n');
        line = line != NULL ? line + 1 : NULL;
    }
    return NULL;
}

static bool text_of(const struct state *state, char *value, size_t size, const char *format, va_list words) {
    char key[MOST_KEY];
    int written = vsnprintf(key, sizeof key, format, words);
    const char *found = written > 0 && (size_t)written < sizeof key ? find(state, key) : NULL;
    if (found == NULL) {
        return false;
    }
    size_t length = strcspn(found, "\n");
    length = length < size ? length : size - 1;
    memcpy(value, found, length);
    value[length] = '\0';
    return true;
}

bool state_text(const struct state *state, char *value, size_t size, const char *key, ...) {
    va_list words;
    va_start(words, key);
    bool found = text_of(state, value, size, key, words);
    va_end(words);
    return found;
}

bool state_number(const struct state *state, unsigned long long *value, const char *key, ...) {
    char text[MOST_DIGITS + 2];
    va_list words;
    va_start(words, key);
    bool found = text_of(state, text, sizeof text, key, words);
    va_end(words);
    return !found || parse_number(text, value);
}

bool parse_number(const char *text, unsigned long long *value) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > MOST_DIGITS || text[digits] != '\0') {
        return false;
    }
    *value = strtoull(text, NULL, 10);
    return true;
}
